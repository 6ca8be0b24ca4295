"""The same answer as engines compute it today: each peer returns logprobs, ranks and alternatives on the card."""

from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.errors import NotRunError

Run = Callable[[Any, Any, int], object]
"""From logits, ids and k to logprobs, ranks and alternatives."""


class Peer(NamedTuple):
    """One way to the answer."""

    label: str
    includes: str
    make: Callable[[Any], Run]
    """Returns the way for PyTorch, or raises a NotRunError with the reason."""
    everywhere: bool = True
    """Whether all sizes are measured, or, because each is compiled anew, two alone."""


def through_torch(logits: Any, ids: Any, top_k: int) -> object:  # noqa: ANN401
    """Materialise the log-softmax in float32, gather, count, and take the largest: what engines do."""
    logprobs = logits.float().log_softmax(-1)
    sampled = logprobs.gather(-1, ids[:, None])
    ranks = (logprobs > sampled).sum(-1) + 1
    alternatives = logprobs.topk(top_k, -1) if top_k else None
    return sampled, ranks, alternatives


def _as_vllm_does(torch: Any) -> Run:  # noqa: ANN401
    def run(logits: Any, ids: Any, top_k: int) -> object:  # noqa: ANN401
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        sampled = logprobs.gather(-1, ids[:, None])
        values, places = logprobs.topk(top_k, dim=-1)
        ranks = (logprobs >= sampled).sum(-1)
        return torch.cat((ids[:, None], places), dim=1).int(), torch.cat((sampled, values), dim=1), ranks

    return run


def _vllm_kernels(_torch: Any) -> Run:  # noqa: ANN401
    try:
        from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
    except ImportError as error:
        raise NotRunError(f"not run: vLLM's kernels cannot be imported: {error}") from None
    return lambda logits, ids, top_k: compute_topk_scores(logits, top_k, ids)


PEERS = (
    Peer(
        "torch, eager",
        "log_softmax in float32, gather, count of what is above, topk; the results stay on the card",
        lambda _torch: through_torch,
    ),
    Peer(
        "torch.compile",
        "the same through torch.compile, which fuses all but topk; compiled before it is measured",
        lambda torch: torch.compile(through_torch, dynamic=False),
        everywhere=False,
    ),
    Peer(
        "vLLM's shape",
        "what vLLM 0.33's sampler does, in plain PyTorch: the cast within log_softmax, topk of k even where k is 0",
        _as_vllm_does,
    ),
    Peer(
        "vLLM's kernels",
        "compute_topk_scores of the installed vLLM: topk of the logits, and kernels in Triton for the rest",
        _vllm_kernels,
    ),
)
