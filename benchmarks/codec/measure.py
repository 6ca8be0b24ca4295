"""The timing: every peer in turn on the same step, again and again."""

import gc
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

from benchmarks.codec.fastdeploy import Pickle, SysVStruct
from benchmarks.codec.ours import GeneratedClasses, ThroughZeroMQ, Views
from benchmarks.codec.peer import Peer, Queues
from benchmarks.codec.vllm import Installed
from benchmarks.errors import NotRunError, WrongDeliveryError
from benchmarks.workload import Case, Step, make_steps, truth

PEERS: tuple[type[Peer], ...] = (Views, ThroughZeroMQ, SysVStruct, Pickle, Installed, GeneratedClasses)
_STEPS = 8
"""How many different steps take turns, so that nothing that was computed for one serves the next."""
_STEADY = 4
"""How many steps a peer does in one turn after its first, which finds the caches as another peer left them."""


class Timing(NamedTuple):
    """The median microseconds that one peer took for a step of one size, and the bytes of its message."""

    us: float
    message_bytes: int


@contextmanager
def lineup() -> Iterator[tuple[list[Peer], dict[str, str]]]:
    """Yield the peers that run here, and by the label of every other one the reason."""
    with ExitStack() as stack:
        peers: list[Peer] = []
        absent: dict[str, str] = {}
        for kind in PEERS:
            try:
                peers.append(stack.enter_context(kind.opened()))
            except NotRunError as error:
                absent[kind.label] = str(error)
        yield peers, absent


def measure(case: Case, peers: Sequence[Peer], turns: int, seed: int) -> dict[str, Timing]:
    """Return each peer's timing, by label; the order of the peers is drawn anew for every round of turns."""
    steps = make_steps(case, _STEPS, seed)
    queues: dict[str, Queues] = {}
    for peer in peers:
        queues[peer.label] = {address: deque() for step in steps for address in peer.addresses(step)}
        peer.prepare(steps)
        _check(peer, steps[0])
    random = np.random.default_rng(seed)
    samples: dict[str, list[int]] = {peer.label: [] for peer in peers}
    with _no_garbage_collection():
        for turn in range(turns):
            for at in random.permutation(len(peers)):
                peer = peers[at]
                mine = [steps[(turn * _STEADY + place) % _STEPS] for place in range(1 + _STEADY)]
                samples[peer.label] += [_timed(peer, step, queues[peer.label]) for step in mine][1:]
    return {
        peer.label: Timing(_median_us(samples[peer.label]), peer.carry(steps[0], queues[peer.label])) for peer in peers
    }


def _check(peer: Peer, step: Step) -> None:
    for row, (got, wanted) in enumerate(zip(peer.deliver(step), truth(step), strict=True)):
        if got != wanted:
            raise WrongDeliveryError(f"{peer.label}, {step.case}, row {row}: {got} is not {wanted}")


def _timed(peer: Peer, step: Step, queues: Queues) -> int:
    """Return the nanoseconds of one step, and take what it delivered afterwards, as the requests would."""
    start = perf_counter_ns()
    peer.carry(step, queues)
    taken = perf_counter_ns() - start
    for address in peer.addresses(step):
        queues[address].clear()
    return taken


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect before, not during: else the peer that runs when it is due pays for what the others left."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _median_us(nanoseconds: Sequence[int]) -> float:
    return float(np.median(nanoseconds)) / 1e3
