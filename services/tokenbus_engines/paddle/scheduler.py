"""Scheduler: which requests a step computes, and which have a slot of the cache."""

from collections import deque
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

    @property
    def computed(self) -> list[Request]:
        """All requests that the step computes something of."""
        return [*self.decoding, *(chunk.request for chunk in self.chunks)]


class Scheduler:
    """Owns the requests from admission to their end, and the slots, which are fewer."""

    def __init__(self, slots: int, chunk: int, slice_steps: int) -> None:
        """Say how many slots there are, and how many tokens of prompts a step computes.

        After `slice_steps` steps with tokens a request is preempted for one that waits, and goes on later; 0: never.
        Other steps do not count: a request that is still computed anew would be preempted again before it got a token.
        """
        self._chunk = chunk
        self._slice_steps = slice_steps
        self._slots = slots
        self._free = list(range(slots))
        self._admitted = 0
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

        Keys and values that came with it are kept for as many requests as there are slots, so that memory is bounded;
        the others' are computed anew.
        """
        if sum(other.handed is not None for other in self._waiting) >= self._slots:
            request.handed = None
        request.serial = self._admitted
        self._admitted += 1
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
        # In the order of admission, which is the batch's; a preempted request keeps its place.
        running = [request for request in self._requests.values() if request.key in self._running]
        decoding = [request for request in running if request.is_decoding]
        for request in decoding:
            request.steps += 1
        return Plan(decoding, self._chunks(running), preempted, aborted)

    def undo(self, plan: Plan) -> None:
        """Learn that a plan's step failed: what it would have ended ends in the next one.

        Slots stay as they are: what was planned of a request is computed again.
        """
        for request in plan.aborted:
            self._requests[request.key] = request
            self._waiting.append(request)

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
