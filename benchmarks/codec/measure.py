"""The timing: every peer in turn on the same step, again and again."""

import gc
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

from benchmarks.codec.ours import STAGES, staged
from benchmarks.codec.peer import Peer, Queues
from benchmarks.errors import WrongDeliveryError
from benchmarks.workload import Case, Step, make_steps, truth

STEPS = 8
"""How many different steps take turns, so that nothing that was computed for one serves the next."""
STEADY = 4
"""How many steps a peer does in one turn after its first, which finds the caches as another peer left them."""


class Timing(NamedTuple):
    """What one peer took for a step of one size, and what its message weighed."""

    median_us: float
    p10_us: float
    p90_us: float
    first_median_us: float
    """Of the first steps of its turns alone; the others are of all but these."""
    message_bytes: int


def measure(case: Case, peers: Sequence[Peer], turns: int, seed: int) -> dict[str, Timing]:
    """Return each peer's timing, by name; the order of the peers is drawn anew for every round of turns."""
    steps = make_steps(case, STEPS, seed)
    queues = {peer.name: _queues(peer, steps) for peer in peers}
    for peer in peers:
        peer.prepare(steps)
        _check(peer, steps[0])
    random = np.random.default_rng(seed)
    samples: dict[str, list[list[int]]] = {peer.name: [] for peer in peers}
    with no_garbage_collection():
        for turn in range(turns):
            mine = [steps[(turn * STEADY + at) % STEPS] for at in range(1 + STEADY)]
            for at in random.permutation(len(peers)):
                peer = peers[at]
                samples[peer.name].append([_timed(peer, step, queues[peer.name]) for step in mine])
    sizes = {peer.name: peer.carry(steps[0], queues[peer.name]) for peer in peers}
    return {name: _timing(taken, sizes[name]) for name, taken in samples.items()}


def measure_stages(case: Case, turns: int, seed: int) -> dict[str, float]:
    """Return the median microseconds of each stage of Tokenbus's own way."""
    steps = make_steps(case, STEPS, seed)
    queues: Queues = {key: deque() for step in steps for key in step.keys}
    samples = []
    with no_garbage_collection():
        for number in range(turns * STEADY):
            step = steps[number % STEPS]
            samples.append(staged(step, queues))
            for key in step.keys:
                queues[key].clear()
    return dict(zip(STAGES, np.round(np.median(samples, axis=0) / 1e3, 2).tolist(), strict=True))


def _check(peer: Peer, step: Step) -> None:
    if not peer.delivers:
        return
    for row, (got, wanted) in enumerate(zip(peer.deliver(step), truth(step), strict=True)):
        if got != wanted:
            raise WrongDeliveryError(f"{peer.name}, {step.case}, row {row}: {got} is not {wanted}")


def _queues(peer: Peer, steps: Sequence[Step]) -> Queues:
    return {address: deque() for step in steps for address in peer.addresses(step)}


def _timed(peer: Peer, step: Step, queues: Queues) -> int:
    """Return the nanoseconds of one step; what it delivered is taken afterwards, as the requests would."""
    start = perf_counter_ns()
    peer.carry(step, queues)
    taken = perf_counter_ns() - start
    if peer.delivers:
        for address in peer.addresses(step):
            queues[address].clear()
    return taken


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect before, not during: otherwise whoever runs when it is due pays for what the others left."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _timing(taken: list[list[int]], size: int) -> Timing:
    first, *steady = np.transpose(taken) / 1e3
    p10, median, p90 = np.percentile(steady, (10, 50, 90)).round(2).tolist()
    return Timing(median, p10, p90, round(float(np.median(first)), 2), size)
