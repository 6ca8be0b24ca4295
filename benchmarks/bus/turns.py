"""The lines of the tables, each a way from a step's arrays in one process to its requests in another, and its turns."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.bus import peers, tokenbus
from benchmarks.bus.pair import Order, Pair, Received, Sent, Stamps, steps_of
from benchmarks.errors import WrongDeliveryError
from benchmarks.report import progress
from benchmarks.workload import HEADLINE_ROWS, HEADLINE_TOKENS, Case, truth

IPC, TCP, SYSV = "ipc", "tcp", "sysv"
RATE = 200.0
QUANTILES = (50, 99)
_WARM = 0.1
"""The share of a turn's steps at a rate that come before all is warm."""
_EDGE = 0.2
"""The share of a turn's time, at both ends, that is no part of its throughput."""
Turn = tuple[Sent, Received]


class Lane(NamedTuple):
    """One way."""

    label: str
    turn: Callable[[Pair, Order], Turn]
    transports: tuple[str, ...] = (IPC, TCP)
    delivers: bool = True


def _between(send: Any, receive: Any) -> Callable[[Pair, Order], Turn]:  # noqa: ANN401
    return lambda pair, order: pair.turn(send, receive, order)


def _relayed(pair: Pair, order: Order) -> Turn:
    return pair.relayed(tokenbus.send_asked, tokenbus.relay, tokenbus.receive_remote, order)


OURS = Lane("Tokenbus", _between(tokenbus.send, tokenbus.receive))
STRUCT = Lane("FastDeploy SysV struct", _between(peers.send_struct, peers.receive_struct), (SYSV,))
LANES = (
    OURS,
    Lane("Tokenbus, remote client", _relayed, (IPC,)),
    STRUCT,
    Lane("FastDeploy pickle + ZeroMQ", _between(peers.send_pickle, peers.receive_pickle)),
    Lane("limit: raw ZeroMQ", _between(peers.send_raw, peers.receive_raw), delivers=False),
)


class Way(NamedTuple):
    """One line of the tables."""

    lane: Lane
    transport: str
    case: Case


class Turns(NamedTuple):
    """What a way did, once for each round."""

    at_rate: list[Turn]
    flat_out: list[Turn]


def measure(  # noqa: PLR0913, PLR0917 - the sizes and times of a run
    pair: Pair, lanes: Sequence[tuple[Lane, str]], top_ks: Sequence[int], rounds: int, steps: int, seconds: float,
    queue: int, seed: int,
) -> dict[Way, Turns]:  # fmt: skip
    """Return what each lane did over its transport at each k, in the order of the lanes, drawn anew for each round."""
    cases = [Case(HEADLINE_ROWS, HEADLINE_TOKENS, top_k) for top_k in top_ks]
    found = {Way(lane, transport, case): Turns([], []) for case in cases for lane, transport in lanes}
    random = np.random.default_rng(seed)
    for number in range(rounds):
        for case in cases:
            for place in random.permutation(len(lanes)).tolist():
                lane, transport = lanes[place]
                way = Way(lane, transport, case)
                progress(f"round {number + 1}/{rounds}, {case}: {way.lane.label}, {way.transport}")
                at_rate = Order(case=case, seed=seed, queue=queue, steps=steps, rate=RATE)
                found[way].at_rate.append(turn(pair, way.lane, way.transport, at_rate))
                flat_out = Order(case=case, seed=seed, queue=queue, seconds=seconds)
                found[way].flat_out.append(turn(pair, way.lane, way.transport, flat_out))
    return found


def turn(pair: Pair, lane: Lane, transport: str, order: Order) -> Turn:
    workers, clients = (pair.address(transport, name) for name in ("workers", "clients"))
    order = order._replace(address=workers, clients_address=clients)
    sent, received = lane.turn(pair, order)
    if sent.at.size != received.at.size:
        raise WrongDeliveryError(f"{lane.label}, {order.case}: {sent.at.size} steps went, {received.at.size} came")
    if lane.delivers and received.first != truth(steps_of(order)[0]):
        raise WrongDeliveryError(f"{lane.label}, {order.case}: the first step is not what the engine emitted")
    return sent, received


def percentiles(turns: Sequence[Turn]) -> dict[float, float]:
    """Return how late all turns' steps were delivered, in microseconds."""
    late = np.concatenate([_late(sent.at, received.at) for sent, received in turns]) / 1e3
    return dict(zip(QUANTILES, np.percentile(late, QUANTILES).tolist(), strict=True))


def rate(turns: Sequence[Turn]) -> float:
    """Return the median turn's steps a second."""
    return median(rate_of(received.at) for _, received in turns)


def rate_of(at: Stamps) -> float:
    """Return the steps a second over the middle of a turn."""
    begin, end = at[0] + (at[-1] - at[0]) * _EDGE, at[-1] - (at[-1] - at[0]) * _EDGE
    middle = at[(at >= begin) & (at <= end)]
    if middle.size < 2:  # noqa: PLR2004 - a rate needs two
        middle = at
    seconds = (middle[-1] - middle[0]) / 1e9
    return float((middle.size - 1) / seconds) if seconds else 0.0


def cost(turns: Sequence[Turn], side: int) -> float:
    """Return the median microseconds of processor time that a step costs a side: 0 sends, 1 receives."""
    return median(turn[side].cpu_ns / 1e3 / max(1, turn[side].at.size) for turn in turns)


def _late(sent: Stamps, came: Stamps) -> Stamps:
    warm = int(sent.size * _WARM)
    late: Stamps = came[warm:] - sent[warm:]
    return late
