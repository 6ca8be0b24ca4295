"""Scheduler: which requests a step computes, and who has a slot of the cache."""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from tokenbus_engines.paddle.requests import Request


class Chunk(NamedTuple):
    """Tokens of a request that a step computes before it can go on."""

    request: Request
    begin: int
    end: int
    gives_token: bool
    """Whether its first token follows; there is none where there is more to compute, or where it had one before."""


class Plan(NamedTuple):
    """What a step does. No request is in it twice."""

    decoding: list[Request]
    chunks: list[Chunk]
    preempted: list[Request]
    aborted: list[Request]


class Scheduler:
    """Owns the requests from admission to their end, and the slots, which are fewer."""

    def __init__(self, slots: int, chunk: int, slice_steps: int) -> None:
        """Say how many slots there are, and how many tokens of prompts a step computes.

        After `slice_steps` steps with tokens a request makes way for one that waits, and goes on later; 0: never. Other
        steps do not count: who is still computed anew would else be sent away again before it got anywhere.
        """
        self._chunk = chunk
        self._slice_steps = slice_steps
        self._slots = slots
        self._free = list(range(slots))
        self._requests: dict[int, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._requests

    @property
    def has_work(self) -> bool:
        """Whether there is a request."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Let a request wait for a slot.

        What came with it is kept for as many as there are slots, so that memory is bounded; others are computed anew.
        """
        if sum(other.handed is not None for other in self._waiting) >= self._slots:
            request.handed = None
        self._requests[request.key] = request
        self._waiting.append(request)

    def abort(self, key: int) -> None:
        """Mark a request, if it is known; the next plan ends it."""
        request = self._requests.get(key)
        if request is not None:
            request.is_aborted = True

    def plan(self) -> Plan:
        """Return what the next step does, after slots have changed hands."""
        aborted = [request for request in self._requests.values() if request.is_aborted]
        for request in aborted:
            self.end(request)
        preempted = self._preempted()
        self._grant()
        # In the order of admission, which is the batch's; who was preempted keeps its place.
        running = [request for request in self._requests.values() if request.key in self._running]
        decoding = [request for request in running if request.is_decoding]
        for request in decoding:
            request.steps += 1
        return Plan(decoding, self._chunks(running), preempted, aborted)

    def in_batch_order(self, requests: Iterable[Request]) -> list[int]:
        """Return the place of each in a batch of them: those known in the order of their admission, then the others."""
        ranks = {key: rank for rank, key in enumerate(self._requests)}
        given = list(requests)
        order = sorted(range(len(given)), key=lambda row: ranks.get(given[row].key, len(ranks)))
        places = [0] * len(given)
        for place, row in enumerate(order):
            places[row] = place
        return places

    def end(self, request: Request) -> None:
        """Let a request go, and take its slot back."""
        del self._requests[request.key]
        if request.slot is None:
            self._waiting.remove(request)
        else:
            self._take_back(request)

    def _preempted(self) -> list[Request]:
        """Take slots from those that had them longest, as many as requests wait for."""
        wanting = len(self._waiting) - len(self._free)
        if not self._slice_steps or wanting <= 0:
            return []
        old = [request for request in self._running.values() if request.steps >= self._slice_steps]
        old.sort(key=lambda request: -request.steps)
        for request in old[:wanting]:
            self._take_back(request)
            self._waiting.append(request)
        return old[:wanting]

    def _grant(self) -> None:
        while self._free and self._waiting:
            request = self._waiting.popleft()
            request.slot = self._free.pop()
            request.steps = 0
            request.computed = request.to_compute if request.handed is not None else 0
            self._running[request.key] = request

    def _take_back(self, request: Request) -> None:
        if request.slot is None:
            raise RuntimeError(f"request {request.key:016x} has no slot to give back")
        self._free.append(request.slot)
        request.slot = None
        del self._running[request.key]

    def _chunks(self, running: list[Request]) -> list[Chunk]:
        left = self._chunk
        chunks = []
        for request in running:
            size = min(left, request.to_compute - request.computed)
            if size > 0:
                end = request.computed + size
                chunks.append(Chunk(request, request.computed, end, not request.output and end == request.to_compute))
                left -= size
        return chunks
