"""The measurements on a card, and what they are to show."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.errors import NotRunError, WrongDeliveryError
from benchmarks.gpu_ops.card import Call, Kernel, alone, copy_bandwidth, host_microseconds, microseconds
from benchmarks.gpu_ops.cases import DTYPES, KINDS, Case, logits_on_card, sampled_ids
from benchmarks.gpu_ops.peers import PEERS, Peer, Run
from benchmarks.outputs import Record
from tokenbus_gpu_ops import token_logprobs

_CACHE_TIMES = 4
_GOAL_ROWS = (256, 1536)
_GOAL_TOP_KS = (0, 20)
_NEAR_ENOUGH = 1e-4
_CHECKED_ROWS = 64


def measure(rows: Sequence[int], top_ks: Sequence[int], progress: Callable[[str], None]) -> Record:
    """Measure everything on the first card; NotRunError where there is none."""
    try:
        import torch
    except ImportError:
        raise NotRunError("not run: PyTorch, which makes the logits, is not installed") from None
    if not torch.cuda.is_available():
        raise NotRunError("not run: there is no CUDA card")
    properties = torch.cuda.get_device_properties(0)
    runs, absent = _runs(torch)
    results = []
    for dtype in DTYPES:
        for kind in KINDS:
            progress(f"{dtype}, {kind}")
            logits = logits_on_card(torch, dtype, kind, max(rows))
            ids = sampled_ids(torch, logits)
            cases = [Case(dtype, kind, count, top_k) for count in rows for top_k in top_ks]
            results += [_measured(torch, case, logits, ids, runs) for case in cases]
            del logits, ids
            torch.cuda.empty_cache()
    return {
        "card": {
            "name": torch.cuda.get_device_name(),
            "multiprocessors": properties.multi_processor_count,
            "cache_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "copy_bytes_per_us": round(copy_bandwidth(torch)),
        },
        "peers": [
            {"name": peer.name, "label": peer.label, "includes": peer.includes, "not_run": absent.get(peer.name)}
            for peer in PEERS
        ],
        "results": results,
        "host": _host(torch),
    }


def _runs(torch: Any) -> tuple[dict[type[Peer], Run], dict[str, str]]:  # noqa: ANN401
    runs: dict[type[Peer], Run] = {}
    absent = {}
    for peer in PEERS:
        try:
            runs[peer] = peer().run(torch)
        except NotRunError as error:
            absent[peer.name] = str(error)
    return runs, absent


def _measured(torch: Any, case: Case, logits: Any, ids: Any, runs: dict[type[Peer], Run]) -> Record:  # noqa: ANN401
    """Return one case's times; it goes over as many different rows as the card's cache cannot hold."""
    size = torch.cuda.get_device_properties(0).L2_cache_size * _CACHE_TIMES
    different = min(len(logits) // case.rows, max(1, -(-size // (case.rows * logits[0].nbytes))))
    places = [slice(at * case.rows, (at + 1) * case.rows) for at in range(different)]
    inputs, their_ids = [logits[place] for place in places], [ids[place] for place in places]

    _check(case, inputs[0], their_ids[0])
    kernel = Kernel(torch, inputs, their_ids[0], case.top_k)
    record = {
        **case._asdict(),
        "floor_us": round(case.floor_us, 2),
        "kernel_us": microseconds(torch, kernel),
        "kernel_alone_us": alone(torch, kernel),
        "call_us": microseconds(torch, _over(token_logprobs, inputs, their_ids, case.top_k)),
        "peers": {},
    }
    for peer, run in runs.items():
        is_goal = case.rows in _GOAL_ROWS and case.top_k in _GOAL_TOP_KS and case.dtype == "bfloat16"
        if case.kind == "random" and (peer.everywhere or is_goal):
            record["peers"][peer.name] = microseconds(torch, _over(run, inputs, their_ids, case.top_k))
    return record


def _over(run: Run, inputs: Sequence[Any], ids: Sequence[Any], top_k: int) -> Call:
    def call(number: int) -> object:
        at = number % len(inputs)
        return run(inputs[at], ids[at], top_k)

    return call


def _check(case: Case, logits: Any, ids: Any) -> None:  # noqa: ANN401
    """Refuse to time an answer that is not float64's."""
    few = slice(0, min(case.rows, _CHECKED_ROWS))
    result = token_logprobs(logits[few], ids[few], case.top_k)
    exact = logits[few].double()
    sampled = exact.gather(-1, ids[few, None])
    logprobs = (sampled[:, 0] - exact.logsumexp(-1)).cpu().numpy()
    ranks = ((exact > sampled).sum(-1) + 1).tolist()
    if result.faults or result.ranks.tolist() != ranks or np.abs(result.logprobs - logprobs).max() > _NEAR_ENOUGH:
        raise WrongDeliveryError(f"{case}: {result.logprobs[:4]} and {result.ranks[:4]} are not {logprobs[:4]}")


def _host(torch: Any) -> Record:  # noqa: ANN401
    """Return how long a call takes to return, for rows all alike and for requests of several tokens each."""
    logits = logits_on_card(torch, "bfloat16", "random", 1024)
    ids = sampled_ids(torch, logits)
    few, few_ids = [logits[:256]], [ids[:256]]
    counts = np.tile([1, 2, 3, 4], 64)
    offsets = np.arange(256) * 4
    top_ks = np.tile([0, 5, 20, 1], 64)

    def ragged(_: int) -> object:
        return token_logprobs(logits, ids, top_ks, token_counts=counts, offsets=offsets)

    return {
        "rows 256, k = 0": host_microseconds(torch, _over(token_logprobs, few, few_ids, 0)),
        "rows 256, k = 20": host_microseconds(torch, _over(token_logprobs, few, few_ids, 20)),
        "256 requests, 1 to 4 tokens, k by request": host_microseconds(torch, ragged),
    }
