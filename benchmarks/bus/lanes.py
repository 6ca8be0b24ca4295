"""The lines of the tables: each a way from a step's arrays in one process to its requests in another."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.bus import peers, remote, tokenbus
from benchmarks.bus.orders import BUFFERS, BY_STEP, ROWS, Order, Received, Sent
from benchmarks.bus.pair import Pair
from benchmarks.codec.fastdeploy_pickle import Pickle
from benchmarks.codec.fastdeploy_struct import STRUCT_BYTES
from benchmarks.codec.ours import message_of
from benchmarks.workload import Step

OURS, TAKEN, BY_STEPS, REMOTE = "tokenbus", "tokenbus_rows", "tokenbus_steps", "tokenbus_remote"
KEYS, NATS = "tokenbus_keys", "tokenbus_nats"
PICKLE, STRUCT, RAW = "fastdeploy_pickle", "fastdeploy_sysv", "zeromq"
TRANSPORTS = ("ipc", "tcp")
SYSV = "sysv"


class Lane(NamedTuple):
    """One way."""

    name: str
    label: str
    includes: str
    turn: Callable[[Pair, Order], tuple[Sent, Received]]
    message_bytes: Callable[[Step], int]
    transports: tuple[str, ...] = TRANSPORTS
    taking: str = BUFFERS
    delivers: bool = True


def _between(send: Any, receive: Any) -> Callable[[Pair, Order], tuple[Sent, Received]]:  # noqa: ANN401 - two halves
    return lambda pair, order: pair.turn(send, receive, order)


def _with_keys(pair: Pair, order: Order) -> tuple[Sent, Received]:
    return pair.turn(tokenbus.send, tokenbus.receive, replace(order, keys=pair.keys()))


def _over_nats(pair: Pair, order: Order) -> tuple[Sent, Received]:
    bus = pair.nats()
    there = replace(order, address=f"{bus}/workers", clients_address=f"{bus}/clients")
    return pair.turn(tokenbus.send, tokenbus.receive, there)


def _relayed(pair: Pair, order: Order) -> tuple[Sent, Received]:
    sent, _, received = pair.relayed(remote.send_asked, remote.relay, remote.receive_remote, order)
    return sent, received


def _ours(step: Step) -> int:
    return len(message_of(step))


_TOKENBUS = _between(tokenbus.send, tokenbus.receive)

LANES = (
    Lane(
        OURS,
        "Tokenbus",
        "LogprobBatch from arrays, publish(); the processor checks, orders and settles it and puts (step, row) into "
        "each request's RequestTokens, from which rows are dropped eight steps at a time; all is acknowledged",
        _TOKENBUS,
        _ours,
    ),
    Lane(
        TAKEN,
        "Tokenbus, a task a request",
        "the same, and each request has an asyncio task that takes its rows as arrays (`rows()`) as they come; "
        "delivered is when they are in the buffers, taken when the task has them",
        _TOKENBUS,
        _ours,
        taking=ROWS,
    ),
    Lane(
        BY_STEPS,
        "Tokenbus, steps()",
        "the same, but one task takes whole steps in batch order (`steps()`), and no request is claimed",
        _TOKENBUS,
        _ours,
        taking=BY_STEP,
    ),
    Lane(
        KEYS,
        "Tokenbus, keys",
        "the same as the first, over tcp with CURVE: each side proves its key, and what passes is encrypted",
        _with_keys,
        _ours,
        transports=TRANSPORTS[1:],
    ),
    Lane(
        NATS,
        "Tokenbus, NATS",
        "the same as the first, but both connect to a nats-server process over tcp, which carries what passes",
        _over_nats,
        _ours,
        transports=TRANSPORTS[1:],
    ),
    Lane(
        REMOTE,
        "Tokenbus, remote client",
        "the same to a Client in a third process that asked for the requests; delivered is when the rows are in "
        "the client's own RequestTokens",
        _relayed,
        _ours,
        transports=TRANSPORTS[:1],
    ),
    Lane(
        STRUCT,
        "FastDeploy SysV struct",
        f"fill the {STRUCT_BYTES:,}-byte struct, msgsnd; msgrcv, copy to the output arrays, lists for each request",
        _between(peers.send_struct, peers.receive_struct),
        lambda _step: STRUCT_BYTES,
        transports=(SYSV,),
    ),
    Lane(
        PICKLE,
        "FastDeploy pickle + ZeroMQ",
        "slice into dataclasses, pickle, PUSH; PULL, unpickle, lists for each request",
        _between(peers.send_pickle, peers.receive_pickle),
        lambda step: len(Pickle().dumped(step)),
    ),
    Lane(
        RAW,
        "limit: raw ZeroMQ",
        "PUSH and PULL of Tokenbus's own message, encoded beforehand; nothing is done with it",
        _between(peers.send_raw, peers.receive_raw),
        _ours,
        delivers=False,
    ),
)
