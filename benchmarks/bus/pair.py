"""One turn: the steps that one process sends and another receives, when each went and came, and what that cost."""

import os
import tempfile
import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from benchmarks.processes import Child, answers_of
from benchmarks.workload import Case, Share, Step, make_steps

Stamps = npt.NDArray[np.int64]
"""Nanoseconds of the monotonic clock, which all processes of a machine share, one a step."""
_STEPS = 8
"""How many different steps take turns, so that nothing that was computed for one serves the next."""
_LEAST_STEPS = 10
"""Of a turn that is given a time: a rate needs some, however slow the peer."""


class Order(NamedTuple):
    """What is sent in a turn, how fast, and for how long."""

    case: Case
    address: str = ""
    clients_address: str = ""
    seed: int = 1
    steps: int = 0
    """How many steps to send; 0: as many as there is time for."""
    seconds: float = 0.0
    rate: float = 0.0
    """How many steps a second; 0: as many as the peer takes."""
    queue: int = 0
    """Of the peer that goes through a System V queue."""


class Sent(NamedTuple):
    """When each step began on its way, and the sender's processor time."""

    at: Stamps
    cpu_ns: int


class Received(NamedTuple):
    """When each step was with its requests, and the receiver's processor time."""

    at: Stamps
    cpu_ns: int
    first: list[Share]
    """What the first step delivered, in row order; nothing of a peer that does not deliver."""


def steps_of(order: Order) -> list[Step]:
    """Return the steps that take turns: the same requests in each, as an engine has."""
    steps = make_steps(order.case, _STEPS, order.seed)
    first = steps[0]
    places = np.random.default_rng(order.seed).permutation(order.case.rows).astype("u4")
    shared = {"request_ids": first.columns["request_ids"], "batch_indices": places}
    return [
        replace(step, keys=first.keys, request_ids=first.request_ids, top_ks=step.top_ks, columns=step.columns | shared)
        for step in steps
    ]


def step_at(steps: list[Step], number: int) -> Step:
    """Return what stands in for a step; they are numbered from 1."""
    return steps[(number - 1) % len(steps)]


class Watch:
    """Notes the time of each step, and the processor time from the first one on."""

    def __init__(self) -> None:
        self._at = array("q")
        self._cpu_began = 0

    def note(self) -> None:
        if not self._at:
            self._cpu_began = time.process_time_ns()
        self._at.append(time.monotonic_ns())

    @property
    def count(self) -> int:
        return len(self._at)

    @property
    def at(self) -> Stamps:
        return np.array(self._at, np.int64)

    @property
    def cpu_ns(self) -> int:
        return time.process_time_ns() - self._cpu_began

    @property
    def sent(self) -> Sent:
        return Sent(self.at, self.cpu_ns)


def send_all(order: Order, send: Callable[[int], object]) -> Watch:
    """Send an order's steps, numbered from 1, each noted before anything is done for it."""
    watch = Watch()
    begin = time.monotonic()
    end = begin + order.seconds if order.seconds else float("inf")
    number = 0
    least = order.steps or _LEAST_STEPS
    while number < least or (not order.steps and time.monotonic() < end):
        if order.rate and (pause := begin + number / order.rate - time.monotonic()) > 0:
            time.sleep(pause)
        number += 1
        watch.note()
        send(number)
    return watch


class Pair:
    """A sender and a receiver, each a process on a core of its own where there are two, and a third for a client."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenbus-bench-"))
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
        first, second = cores[-2:] if len(cores) > 1 else (None, None)
        self.sender, self.receiver = (self._stack.enter_context(Child(core)) for core in (first, second))
        self._client: Child | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def address(self, transport: str, name: str) -> str:
        return "tcp://127.0.0.1:0" if transport == "tcp" else f"ipc://{self.folder}/{name}"

    def turn(self, send: Callable[..., Sent], receive: Callable[..., object], order: Order) -> tuple[Sent, Received]:
        self.receiver.begin(receive, order)
        self.sender.begin(send, order._replace(address=self.receiver.answer()))
        sent, received = answers_of(self.sender, self.receiver)
        return sent, received

    def relayed(
        self, send: Callable[..., Sent], relay: Callable[..., object], receive: Callable[..., Received], order: Order
    ) -> tuple[Sent, Received]:
        """Let a third process receive what the second one relays."""
        if self._client is None:
            self._client = self._stack.enter_context(Child())
        self.receiver.begin(relay, order)
        workers, clients = self.receiver.answer()
        there = order._replace(address=workers, clients_address=clients)
        self.sender.begin(send, there)
        self._client.begin(receive, there)
        sent, _, received = answers_of(self.sender, self.receiver, self._client)
        return sent, received
