"""The CPU twin beside the plain way in numpy and PyTorch's, on one core and on all."""

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
import numpy.typing as npt

from benchmarks.gpu_ops.cases import VOCABULARY
from benchmarks.gpu_ops.peers import through_torch
from benchmarks.report import Row, core_to_keep, on_cores
from tokenbus_gpu_ops import token_logprobs

Floats = npt.NDArray[np.float32]

ROWS = (1, 16, 64)
_TOP_KS = (0, 20)
_REPEATS = 9


def measure(rows: Sequence[int] = ROWS) -> list[Row]:
    """Measure every size; PyTorch's lines are absent where it is not installed."""
    random = np.random.default_rng(1)
    results = []
    for count in rows:
        logits = random.normal(0, 2.5, (count, VOCABULARY)).astype(np.float32)
        ids = random.integers(0, VOCABULARY, count)
        results += [_measured(logits, ids, top_k) for top_k in _TOP_KS]
    return results


def through_numpy(logits: Floats, ids: npt.NDArray[np.int64], top_k: int) -> object:
    """Materialise the log-softmax, count what is above, and partition: the plain way."""
    largest = logits.max(axis=1, keepdims=True)
    logprobs = logits - largest - np.log(np.exp(logits - largest).sum(axis=1, keepdims=True))
    sampled = np.take_along_axis(logprobs, ids[:, None], axis=1)
    ranks = (logprobs > sampled).sum(axis=1) + 1
    if not top_k:
        return sampled, ranks
    places = np.argpartition(logprobs, VOCABULARY - top_k, axis=1)[:, -top_k:]
    values = np.take_along_axis(logprobs, places, axis=1)
    order = np.lexsort((places, -values), axis=1)
    return sampled, ranks, np.take_along_axis(places, order, axis=1), np.take_along_axis(values, order, axis=1)


def _measured(logits: Floats, ids: npt.NDArray[np.int64], top_k: int) -> Row:
    count = len(logits)
    with on_cores(core_to_keep()):
        twin = _microseconds(lambda: token_logprobs(logits, ids, top_k)) / count
        numpy = _microseconds(lambda: through_numpy(logits, ids, top_k)) / count
    row: Row = {"rows": count, "k": top_k, "twin": twin, "numpy": numpy, "times the twin": numpy / twin}
    try:
        import torch
    except ImportError:
        return row
    tensor, their_ids = torch.from_numpy(logits), torch.from_numpy(ids)
    threads = torch.get_num_threads()
    many = _microseconds(lambda: through_torch(tensor, their_ids, top_k)) / count
    torch.set_num_threads(1)
    try:
        one = _microseconds(lambda: through_torch(tensor, their_ids, top_k)) / count
    finally:
        torch.set_num_threads(threads)
    return {**row, "torch, 1 thread": one, f"torch, {threads} threads": many}


def _microseconds(run: Callable[[], object]) -> float:
    run()
    taken = []
    for _ in range(_REPEATS):
        before = perf_counter()
        run()
        taken.append(perf_counter() - before)
    return float(np.median(taken)) * 1e6
