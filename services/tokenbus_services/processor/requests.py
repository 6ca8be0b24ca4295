"""The open requests: who has each, how far it has come, and who wants its tokens.

What every step needs of every row lies in arrays, so that a step of a thousand rows is settled in a few
operations, and the number of open requests does not matter.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.generated.request_pb2 import Generate, RequestError
from tokenbus_services.delivery.step import Step

NO_STREAM = -1
NO_OWNER = 0
Payer = tuple[str, int]
"""Which peer an open request counts against: the client that asked for it, or the worker that brought it unasked."""
Slots = npt.NDArray[np.intp]


class State(IntEnum):
    """Where a request stands."""

    OPEN = 1
    """One stream has it; its next row comes from there."""
    HANDED_OFF = 2
    """Its stream let go of it; the next one that goes on where it ended has it."""
    WAITING = 3
    """It began before this processor did: where it goes on is not known yet."""
    ENDED = 4
    """It has ended, and nobody has asked for its tokens yet."""


@dataclass(slots=True, frozen=True)
class Source:
    """Where a step came from, as far as rows of requests that nobody knows are concerned."""

    stream: int
    name: str
    is_resumed: bool
    """Whether the stream began before this processor did."""
    takes_over: bool
    """Whether its worker goes on with requests that others began."""
    owners: dict[int, int] = field(default_factory=dict, compare=False)
    """Whose requests its worker had when it introduced itself, by request key."""

    @property
    def payer(self) -> Payer:
        """What counts the requests that it brings unasked."""
        return "worker", self.stream


class EarlyRow(NamedTuple):
    """A row that waits for what comes before it, as a step of its own."""

    source: Source
    step: Step


@dataclass(slots=True, eq=False)
class Request:
    """What is known of one request beside what lies in the arrays."""

    key: int
    slot: int
    first_position: int
    """The first token that was known here."""
    deadline: float
    generate: Generate | None = None
    """What was sent to a worker, until that worker takes it."""
    is_claimed: bool = False
    """Whether somebody asked for its tokens."""
    prompt_tokens: int = 0
    aborted_at: float | None = None
    handed_off_at: float | None = None
    handed_off_by: int = NO_STREAM
    """The stream that let go of it, once one did."""
    is_inherited: bool = False
    """Whether its heir said that it has it, before the stream that has it let go."""
    early: list["EarlyRow"] = field(default_factory=list)
    """Rows that came out of order, before those that go before them."""
    owner: int = NO_OWNER
    """Who asked for it: only that client, or its next life, may take it up or end it."""
    payer: Payer | None = None
    deadline_unix_ms: int = 0
    last_frame: tuple[int, int] | None = None
    """The session that got its last row, and the number of that frame in the session's queue."""


@dataclass(slots=True, frozen=True)
class Ended:
    """How a request ended: with an error, or without."""

    error: RequestError | None
    tokens: int
    owner: int
    last_frame: tuple[int, int] | None


class RequestTable:
    """All open requests, and for a while those that ended."""

    def __init__(self, max_requests: int, ended_requests: int, per_peer: int | None = None) -> None:
        """Hold at most so many open requests, so many of them for one peer, and remember so many that ended."""
        self._per_peer = max_requests if per_peer is None else per_peer
        self._charged: dict[Payer, dict[int, None]] = {}
        self._slots: dict[int, int] = {}
        self._requests: list[Request | None] = []
        self._free: list[int] = []
        self._ended: OrderedDict[int, Ended] = OrderedDict()
        self._max_requests = max_requests
        self._ended_requests = ended_requests
        self._version = 0
        self._cached_version = -1
        self._cached_keys = b""
        self._cached_slots: Slots = np.zeros(0, np.intp)
        self.peak = 0
        self.next_position = np.zeros(64, np.int64)
        self.owner = np.full(64, NO_STREAM, np.int32)
        self.handoff_target = np.full(64, NO_STREAM, np.int32)
        """The stream that is to go on with each request when its owner lets go, where that is known."""
        self.state = np.zeros(64, np.uint8)
        self.route = np.zeros(64, np.int32)
        self.wants_draft = np.zeros(64, np.bool_)
        self.due = np.full(64, np.inf)
        """When to look at each request again."""
        self.contexts: list[Any] = []
        """What belongs to the consumer of each request, by slot."""

    def __len__(self) -> int:
        """Return how many requests are open."""
        return len(self._slots)

    @property
    def is_full(self) -> bool:
        """Whether no more may be opened."""
        return len(self._slots) >= self._max_requests

    def has_room_for(self, payer: Payer | None) -> bool:
        """Whether one more may be opened for a peer."""
        return not self.is_full and (payer is None or self.charged_to(payer) < self._per_peer)

    def charged_to(self, payer: Payer) -> int:
        """Return how many open requests count against a peer."""
        return len(self._charged.get(payer, ()))

    def charge(self, request: Request, payer: Payer | None) -> None:
        """Count a request against another peer from now on."""
        if request.payer is not None:
            of_before = self._charged[request.payer]
            of_before.pop(request.slot)
            if not of_before:
                del self._charged[request.payer]
        request.payer = payer
        if payer is not None:
            self._charged.setdefault(payer, {})[request.slot] = None

    def oldest_unasked(self) -> Request | None:
        """Return the oldest request of the worker that brought most of those that were not asked for."""
        payers = [payer for payer in self._charged if payer[0] == "worker"]
        if not payers:
            return None
        return self.at(next(iter(self._charged[max(payers, key=self.charged_to)])))

    def get(self, key: int) -> Request | None:
        """Return an open request."""
        slot = self._slots.get(key)
        return None if slot is None else self._requests[slot]

    def at(self, slot: int) -> Request:
        """Return the request that has a slot."""
        request = self._requests[slot]
        if request is None:
            raise KeyError(slot)
        return request

    def ended(self, key: int) -> Ended | None:
        """Return how a request ended, if it is still known."""
        return self._ended.get(key)

    def knows(self, key: int) -> bool:
        """Tell whether a request is open, or is remembered."""
        return key in self._slots or key in self._ended

    def open_requests(self) -> list[Request]:
        """Return all open requests."""
        return [self.at(slot) for slot in self._slots.values()]

    def of_stream(self, stream: int) -> list[Request]:
        """Return the open requests that a stream has."""
        return [self.at(slot) for slot in np.flatnonzero(self.owner == stream).tolist()]

    def of_handoff_target(self, stream: int) -> list[Request]:
        """Return the open requests that a stream is to go on with."""
        return [self.at(slot) for slot in np.flatnonzero(self.handoff_target == stream).tolist()]

    def give(self, request: Request, stream: int) -> None:
        """Let a stream have a request that another let go of."""
        self.owner[request.slot], self.handoff_target[request.slot], self.state[request.slot] = (
            stream,
            NO_STREAM,
            State.OPEN,
        )
        request.handed_off_at = None
        request.is_inherited = False

    def due_requests(self, now: float) -> list[Request]:
        """Return the open requests that it is time to look at."""
        return [self.at(slot) for slot in np.flatnonzero(self.due <= now).tolist()]

    def look_again(self, request: Request, when: float) -> None:
        """See to it that a request is looked at then, if not before."""
        self.due[request.slot] = min(self.due[request.slot], when)

    def slots_of(self, keys: npt.NDArray[np.uint64]) -> Slots:
        """Return the slots of some keys; -1 where none is open."""
        contents = keys.tobytes()
        # Step after step has the same requests, most of the time.
        if self._cached_version == self._version and contents == self._cached_keys:
            return self._cached_slots
        slots = np.fromiter(map(self._slots.get, keys.tolist(), repeat(-1)), np.intp, keys.size)
        self._cached_version, self._cached_keys, self._cached_slots = self._version, contents, slots
        return slots

    def open(  # noqa: PLR0913, PLR0917 - what a request begins with
        self, key: int, position: int, owner: int, state: State, deadline: float, payer: Payer | None = None
    ) -> Request:
        """Open a request at the stream that has it; the caller asked before whether there is room."""
        slot = self._free.pop() if self._free else self._new_slot()
        request = Request(key, slot, position, deadline)
        self._slots[key] = slot
        self._requests[slot] = request
        self.charge(request, payer)
        self._version += 1
        self._ended.pop(key, None)
        self.next_position[slot] = position
        self.owner[slot] = owner
        self.handoff_target[slot] = NO_STREAM
        self.state[slot] = state
        self.route[slot] = 0
        self.wants_draft[slot] = True
        self.due[slot] = deadline
        self.contexts[slot] = None
        self.peak = max(self.peak, len(self._slots))
        return request

    def close(self, request: Request, error: RequestError | None) -> None:
        """Forget an open request, but remember for a while how it ended."""
        del self._slots[request.key]
        self.charge(request, None)
        self._requests[request.slot] = None
        self._version += 1
        self._free.append(request.slot)
        self.owner[request.slot] = NO_STREAM
        self.handoff_target[request.slot] = NO_STREAM
        self.state[request.slot] = 0
        self.due[request.slot] = np.inf
        self.contexts[request.slot] = None
        tokens = int(self.next_position[request.slot])
        self._ended[request.key] = Ended(error, tokens, request.owner, request.last_frame)
        if len(self._ended) > self._ended_requests:
            self._ended.popitem(last=False)

    def _new_slot(self) -> int:
        slot = len(self._requests)
        self._requests.append(None)
        self.contexts.append(None)
        if slot == self.owner.size:
            for name in ("next_position", "owner", "handoff_target", "state", "route", "wants_draft", "due"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, column]))
            # These are counted and searched as a whole: what is not open yet must look like nobody's.
            self.owner[slot:] = NO_STREAM
            self.handoff_target[slot:] = NO_STREAM
            self.due[slot:] = np.inf
            self.state[slot:] = 0
        return slot
