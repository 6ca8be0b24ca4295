"""What engines do today for the same answer: each peer returns logprobs, ranks and alternatives on the card."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, ClassVar

from benchmarks.errors import NotRunError

Run = Callable[[Any, Any, int], object]


class Peer:
    """One way from logits and ids to logprobs, ranks and alternatives, left on the card."""

    name: ClassVar[str]
    label: ClassVar[str]
    includes: ClassVar[str]
    everywhere: ClassVar[bool] = True
    """Whether all sizes are measured, or, because each is compiled anew, those of the goals alone."""

    def run(self, torch: Any) -> Run:  # noqa: ANN401
        """Return what does it, or raise NotRunError with the reason."""
        raise NotImplementedError


def through_torch(logits: Any, ids: Any, top_k: int) -> object:  # noqa: ANN401
    """Materialise the log-softmax in float32, gather, count, and take the largest: what engines do."""
    logprobs = logits.float().log_softmax(-1)
    sampled = logprobs.gather(-1, ids[:, None])
    ranks = (logprobs > sampled).sum(-1) + 1
    alternatives = logprobs.topk(top_k, -1) if top_k else None
    return sampled, ranks, alternatives


class Eager(Peer):
    """PyTorch as it is."""

    name = "torch"
    label = "torch, eager"
    includes = "log_softmax in float32, gather, count of what is above, topk; the results stay on the card"

    def run(self, torch: Any) -> Run:  # noqa: ANN401
        """Return the plain function."""
        del torch
        return through_torch


class Compiled(Peer):
    """PyTorch's compiler over the same function."""

    name = "torch_compiled"
    label = "torch.compile"
    includes = "the same through torch.compile, which fuses all but topk; compiled before it is measured"
    everywhere = False

    def run(self, torch: Any) -> Run:  # noqa: ANN401
        """Return the compiled function."""
        return torch.compile(through_torch, dynamic=False)  # type: ignore[no-any-return]


def as_vllm_does(logits: Any, ids: Any, top_k: int) -> object:  # noqa: ANN401
    """Do in plain PyTorch what vLLM's sampler does: the cast is part of the log-softmax."""
    import torch

    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    sampled = logprobs.gather(-1, ids[:, None])
    values, places = logprobs.topk(top_k, dim=-1)
    ranks = (logprobs >= sampled).sum(-1)
    return torch.cat((ids[:, None], places), dim=1).int(), torch.cat((sampled, values), dim=1), ranks


class VLLMShape(Peer):
    """What vLLM's sampler does, without vLLM."""

    name = "vllm_shape"
    label = "vLLM's shape"
    includes = (
        "what vLLM 0.33's sampler does, in plain PyTorch: the cast within log_softmax, topk of k even where k is 0"
    )

    def run(self, torch: Any) -> Run:  # noqa: ANN401
        """Return the plain function."""
        del torch
        return as_vllm_does


class VLLM(Peer):
    """vLLM's own sampler functions."""

    name = "vllm"
    label = "vLLM's sampler"
    includes = "Sampler.compute_logprobs and Sampler.gather_logprobs of the installed vLLM"

    def run(self, torch: Any) -> Run:  # noqa: ANN401
        """Return vLLM's functions, where it is installed."""
        del torch
        try:
            from vllm.v1.sample.sampler import Sampler
        except ImportError as error:
            raise _not_installed("vllm", error) from None

        def run(logits: Any, ids: Any, top_k: int) -> object:  # noqa: ANN401
            return Sampler.gather_logprobs(Sampler.compute_logprobs(logits), top_k, token_ids=ids)

        return run


class VLLMKernels(Peer):
    """vLLM's own kernels, in Triton."""

    name = "vllm_kernels"
    label = "vLLM's kernels"
    includes = "compute_topk_scores of the installed vLLM: topk of the logits, and kernels in Triton for the rest"

    def run(self, torch: Any) -> Run:  # noqa: ANN401
        """Return vLLM's function, where it is installed and has it."""
        del torch
        try:
            from vllm.v1.worker.gpu.sample.logprob import (
                compute_topk_scores,
            )
        except ImportError as error:
            raise _not_installed("vllm", error) from None

        def run(logits: Any, ids: Any, top_k: int) -> object:  # noqa: ANN401
            return compute_topk_scores(logits, top_k, ids)

        return run


def _not_installed(name: str, error: ImportError) -> NotRunError:
    if find_spec(name) is None:
        return NotRunError(f"not run: {name} is not installed")
    return NotRunError(f"not run: the installed {name} has no such function: {error}")


class Paddle(Peer):
    """Paddle's equivalent of the eager function."""

    name = "paddle"
    label = "paddle"
    includes = "log_softmax in float32, take_along_axis, count, topk; the logits are shared through DLPack beforehand"

    def run(self, torch: Any) -> Run:  # noqa: ANN401
        """Return the same in Paddle, where it is installed with CUDA."""
        try:
            import paddle
        except ImportError as error:
            raise _not_installed("paddle", error) from None
        if not paddle.device.is_compiled_with_cuda():
            raise NotRunError("not run: the installed paddle is built without CUDA")
        shared: dict[tuple[int, tuple[int, ...]], Any] = {}

        def as_paddle(tensor: Any) -> Any:  # noqa: ANN401
            key = (tensor.data_ptr(), tuple(tensor.shape))
            if key not in shared:
                shared[key] = paddle.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))
            return shared[key]

        def run(logits: Any, ids: Any, top_k: int) -> object:  # noqa: ANN401
            logprobs = paddle.nn.functional.log_softmax(as_paddle(logits).astype("float32"), -1)
            sampled = paddle.take_along_axis(logprobs, as_paddle(ids).unsqueeze(-1), -1)
            ranks = (logprobs > sampled).sum(-1) + 1
            return sampled, ranks, paddle.topk(logprobs, top_k, -1) if top_k else None

        return run


PEERS: tuple[type[Peer], ...] = (Eager, Compiled, VLLMShape, VLLM, VLLMKernels, Paddle)
