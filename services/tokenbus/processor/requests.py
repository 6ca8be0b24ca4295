"""A request's states, and the table of all requests: in arrays, so that a step is settled in a few operations."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus.delivery.ack_tracker import PendingAck
from tokenbus.delivery.slots import SlotMap, Slots
from tokenbus.delivery.step import Step
from tokenbus.processor.stream import StreamCounts
from tokenbus_contracts import LogprobBatch
from tokenbus_contracts.generated.request_pb2 import ContinuationPolicy, Generate, PromptScoresChunk, RequestError
from tokenbus_contracts.native import RequestColumns

NO_STREAM = -1
NO_OWNER = 0
UNCLAIMED = 0
"""The route of requests whose rows wait until a client resumes them."""
UNROUTED = -1
"""The route of requests that only `steps()` shows."""
Payer = tuple[str, int | str]
"""What an open request counts against: the client that asked for it, or the worker or key that brought it unasked."""


class State(IntEnum):
    """The states of a request."""

    CLOSED = 0
    """It is not in the table."""
    QUEUED = 1
    """No worker has it yet."""
    RUNNING = 2
    """One stream has it; its next row comes from there."""
    RESUMED = 3
    """Its client resumed it, and no worker has said yet that it has it."""
    ENDED = 4
    """It ended before its client claimed it; its rows wait for the client."""


class TransitionError(Exception):
    """A change that the state of a request does not allow: a defect of the processor."""

    def __init__(self, request_id: int, state: State, to: State) -> None:
        super().__init__(f"request {request_id:016x}: {to.name.lower()} does not follow {state.name.lower()}")


class Deadline(NamedTuple):
    """When a request ends at the latest: by the processor's clock in seconds, and in milliseconds since 1970 UTC."""

    at: float
    unix_ms: int = 0
    after_ms: int = 0
    """How long that was, when it was set."""


@dataclass(slots=True, frozen=True)
class Source:
    """Where a step came from, as far as rows of unknown requests are concerned."""

    stream: int
    name: str
    is_resumed: bool
    """Whether the stream began before this processor did."""
    owners: dict[int, int] = field(default_factory=dict, compare=False)
    """The requests that its worker said that it has, and the owner of each; it may have let go of some since."""
    counts: StreamCounts = field(default_factory=StreamCounts, compare=False)
    """Where its rows count."""
    key: str = ""
    """The name of the key that its worker proved; empty: it proved none."""

    def count(self, rows: LogprobBatch) -> None:
        """Count rows that were handed out."""
        self.counts.tokens += rows.token_ids.size

    @property
    def payer(self) -> Payer:
        """What the requests that it brings unasked count against: its worker's key, whatever worker ids that uses."""
        return ("key", self.key) if self.key else ("worker", self.stream)


@dataclass(slots=True, eq=False)
class Request:
    """One request: all but the columns of the table."""

    id: int
    slot: int
    deadline: Deadline
    generate: Generate | None = None
    """What was sent to a worker, until that worker admits it."""
    sent_after: int = 0
    """The number of its worker's hello after which it was sent."""
    for_decode: Generate | None = None
    """The request at a prefill worker, for the decode worker that goes on with it."""
    transfer_state: bytes = b""
    """The transfer state that the prefill worker sent, for the decode worker."""
    weight_version: int = 0
    """The version of the weights of the worker that admitted it."""
    is_claimed: bool = False
    """Whether a consumer takes its tokens."""
    can_go_on: bool = False
    """Whether its client can continue it at another processor, as far as is known."""
    aborted_at: float | None = None
    waiting: list[tuple[Step, int]] = field(default_factory=list)
    """Rows that wait for its client, as a step and a place in it."""
    scores: list[tuple[PromptScoresChunk, PendingAck]] = field(default_factory=list)
    """What the model says of its prompt's tokens, which waits for its client."""
    error: RequestError | None = None
    """What it ended with before its client claimed it."""
    owner: int = NO_OWNER
    """The client that asked for it: only that client, or its next life, may take it up or end it."""
    payer: Payer | None = None
    asked_after: int = 0
    """The number of its client's hello after which it was asked for; 0: another life of the processor was asked."""
    last_frame: tuple[int, int] | None = None
    """The route of the session that got its last row, and the number of that frame in the session's queue."""


@dataclass(slots=True, frozen=True)
class Ended:
    """How a request ended: with an error, or without."""

    error: RequestError | None
    tokens: int
    owner: int
    last_frame: tuple[int, int] | None
    asked_after: int = 0


_EMPTY: Mapping[str, float] = {
    "next_position": 0,
    "stream": NO_STREAM,
    "decoder": NO_STREAM,
    "state": State.CLOSED,
    "route": UNCLAIMED,
    "wants_draft": True,
    "due": np.inf,
}
"""What each column has in a slot without a request."""


class RequestTable:
    """All open requests, and for a while those that ended.

    The columns have a value for each slot. Any module reads them; only the methods here write them.
    """

    def __init__(self, max_requests: int, ended_requests: int, per_peer: int) -> None:
        self._per_peer = per_peer
        self._charged: dict[Payer, dict[int, None]] = {}
        self._slots = SlotMap()
        self._requests: list[Request | None] = []
        self._ended: OrderedDict[int, Ended] = OrderedDict()
        self._ended_at_clients: OrderedDict[int, int] = OrderedDict()
        """The owners of requests that had ended at their clients before any worker brought them here."""
        self._max_requests = max_requests
        self._ended_requests = ended_requests
        self.next_position = np.zeros(64, np.int64)
        self.stream = np.full(64, NO_STREAM, np.int32)
        """The stream that has each request."""
        self.decoder = np.full(64, NO_STREAM, np.int32)
        """The decode worker's stream whose room is reserved for each request at a prefill worker."""
        self.state = np.zeros(64, np.uint8)
        self.route = np.zeros(64, np.int32)
        """Which consumer takes the rows of each request."""
        self.wants_draft = np.ones(64, np.bool_)
        self.due = np.full(64, np.inf)
        """When to look at each request again."""
        self.buffered_rows = 0
        """How many rows wait for the client of their request."""
        self.running = self._running()
        """Which rows come next, and which consumer takes them, for what reads the columns in place."""

    # Finding requests.

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def is_full(self) -> bool:
        """Whether no more may be opened."""
        return len(self._slots) >= self._max_requests

    def limit_for(self, payer: Payer) -> str:
        """Return which limit keeps one more from being opened for a peer; empty: none."""
        if self.is_full:
            return f"open requests: at most {self._max_requests}"
        if not self.room_for(payer):
            return f"open requests of one {payer[0]}: at most {self._per_peer}"
        return ""

    def room_for(self, payer: Payer) -> int:
        """Return how many more requests may be opened for a peer."""
        return max(0, min(self._per_peer - self.charged_to(payer), self._max_requests - len(self)))

    def charged_to(self, payer: Payer) -> int:
        """Return how many open requests count against a peer."""
        return len(self._charged.get(payer, ()))

    def oldest_unasked(self) -> Request | None:
        """Return the oldest request of the worker or key that brought most of those that were not asked for."""
        payers = [payer for payer in self._charged if payer[0] != "client"]
        if not payers:
            return None
        return self.at(next(iter(self._charged[max(payers, key=self.charged_to)])))

    def get(self, request_id: int) -> Request | None:
        """Return an open request."""
        slot = self._slots.get(request_id)
        return None if slot is None else self._requests[slot]

    def at(self, slot: int) -> Request:
        """Return the request of a slot; an empty slot is a KeyError."""
        request = self._requests[slot]
        if request is None:
            raise KeyError(slot)
        return request

    def state_of(self, request: Request) -> State:
        """Return the state of a request that is open."""
        return State(self.state[request.slot])

    def stream_of(self, request: Request) -> int:
        """Return the stream that has a request, or NO_STREAM."""
        return int(self.stream[request.slot])

    def ended(self, request_id: int) -> Ended | None:
        """Return how a request ended, if that is still known."""
        return self._ended.get(request_id)

    def has_ended_at_client(self, request_id: int) -> bool:
        """Tell whether a request had ended at its client before it came here."""
        return request_id in self._ended_at_clients

    def knows(self, request_id: int) -> bool:
        """Tell whether a request is open, or its end is known."""
        return request_id in self._slots or request_id in self._ended or request_id in self._ended_at_clients

    def ended_at_client(self, request_id: int, owner: int) -> None:
        """Remember that a request that is not known here has ended at a client, the first that says so."""
        self._ended_at_clients.setdefault(request_id, owner)
        if len(self._ended_at_clients) > self._ended_requests:
            self._ended_at_clients.popitem(last=False)

    def worker_has(self, request_id: int, owner: int) -> None:
        """Learn that a worker has a request of an owner's: another client's word on one with this key is forgotten."""
        if owner == NO_OWNER or self._ended_at_clients.get(request_id) != owner:
            self._ended_at_clients.pop(request_id, None)

    def asked_again(self, request_id: int, owner: int) -> None:
        """Learn that a client asks for a request that it said had ended: it has used the key again."""
        if self._ended_at_clients.get(request_id) == owner:
            del self._ended_at_clients[request_id]

    def forget_end(self, request_id: int) -> None:
        """Forget how a request ended: a worker may come with it."""
        self._ended.pop(request_id, None)

    def open_requests(self) -> list[Request]:
        """Return all open requests, the oldest first."""
        return [self.at(slot) for slot in self._slots]

    def of_stream(self, stream: int) -> list[Request]:
        """Return the open requests that a stream has."""
        return [self.at(slot) for slot in np.flatnonzero(self.stream == stream).tolist()]

    def resumed(self) -> list[Request]:
        """Return the requests that clients have resumed, and that no worker is known to have."""
        return [self.at(slot) for slot in np.flatnonzero(self.state == State.RESUMED).tolist()]

    def load_of(self, stream: int) -> int:
        """Return how many requests a stream has, or has room reserved for."""
        return int(np.count_nonzero(self.stream == stream)) + int(np.count_nonzero(self.decoder == stream))

    def requests_of(self, route: int, stream: int) -> int:
        """Return how many requests of a consumer a stream has."""
        return int(np.count_nonzero((self.stream == stream) & (self.route == route)))

    def due_requests(self, now: float) -> list[Request]:
        """Return the open requests that it is time to look at."""
        return [self.at(slot) for slot in np.flatnonzero(self.due <= now).tolist()]

    def slots_of(self, request_ids: npt.NDArray[np.uint64]) -> Slots:
        """Return the slot of each request; -1 where none is open."""
        return self._slots.find(request_ids)

    # Transitions.

    def open(self, request_id: int, position: int, stream: int, state: State, deadline: Deadline) -> Request:
        """Open a request at the stream that has it, due at its deadline; the caller checks first that there is room."""
        slot = self._slots.add(request_id)
        if slot == len(self._requests):
            self._add_slot()
        request = self._requests[slot] = Request(request_id, slot, deadline)
        self._ended.pop(request_id, None)
        self._ended_at_clients.pop(request_id, None)
        self.next_position[slot] = position
        self.stream[slot] = stream
        self.state[slot] = state
        self.due[slot] = deadline.at
        return request

    def submit(self, generate: Generate, stream: int, route: int, owner: int, deadline: Deadline) -> Request:
        """Open a request that a client asks for: at the stream that gets it, or queued where that is NO_STREAM."""
        state = State.QUEUED if stream == NO_STREAM else State.RUNNING
        position = len(generate.continuation.token_ids)
        request = self.open(generate.request_id, position, stream, state, deadline)
        request.generate = Generate()
        request.generate.CopyFrom(generate)
        request.generate.owner = owner
        request.generate.deadline_unix_ms = deadline.unix_ms
        request.can_go_on = _can_go_on(generate)
        self.claim(request, route, owner, drafts=generate.include_draft_logprobs)
        return request

    def appear(self, request_id: int, position: int, source: Source, deadline: Deadline, route: int) -> Request:
        """Open a request that a source brings unasked."""
        request = self.open(request_id, position, source.stream, State.RUNNING, deadline)
        request.owner = source.owners.get(request_id, NO_OWNER)
        request.is_claimed = route != UNCLAIMED
        self._charge(request, source.payer)
        self.route[request.slot] = route
        return request

    def resume(self, request_id: int, position: int, now: float) -> Request:
        """Open a request that a client has resumed before a worker brought it."""
        return self.open(request_id, position, NO_STREAM, State.RESUMED, Deadline(now))

    def dispatch(self, request: Request, stream: int) -> None:
        """Give a queued request to a stream."""
        self._run(request, stream, State.QUEUED)

    def give_back(self, request: Request) -> None:
        """Queue a request again whose stream never began with it."""
        self._move(request, State.QUEUED, State.RUNNING)
        self.stream[request.slot] = self.decoder[request.slot] = NO_STREAM

    def decode(self, request: Request, stream: int, generate: Generate) -> None:
        """Give a request whose prefill has ended to a decode worker's stream."""
        self._run(request, stream, State.RUNNING)
        self.decoder[request.slot] = NO_STREAM
        request.generate, request.for_decode, request.transfer_state = generate, None, b""

    def go_on(self, request: Request, stream: int) -> None:
        """Give a request that no stream has to the stream that has it after all."""
        self._run(request, stream, State.QUEUED, State.RESUMED)

    def end(self, request: Request, error: RequestError | None) -> None:
        """End a request that no client has claimed yet."""
        self._move(request, State.ENDED, State.RUNNING)
        request.error = error
        self.stream[request.slot] = NO_STREAM

    def close(self, request: Request, error: RequestError | None) -> None:
        """Remove a request, and remember for a while how it ended."""
        self._move(request, State.CLOSED, *State)
        slot = request.slot
        self._slots.remove(request.id)
        self._charge(request, None)
        self._requests[slot] = None
        self._ended[request.id] = Ended(
            error, int(self.next_position[slot]), request.owner, request.last_frame, request.asked_after
        )
        for name, value in _EMPTY.items():
            getattr(self, name)[slot] = value
        if len(self._ended) > self._ended_requests:
            self._ended.popitem(last=False)

    def _move(self, request: Request, to: State, *before: State) -> None:
        state = self.state_of(request) if self._requests[request.slot] is request else State.CLOSED
        if state is State.CLOSED or state not in before:
            raise TransitionError(request.id, state, to)
        self.state[request.slot] = to

    def _run(self, request: Request, stream: int, *before: State) -> None:
        self._move(request, State.RUNNING, *before)
        self.stream[request.slot] = stream

    # Rows that wait for the client of their request: after a restart, workers may be back before clients.

    def put_aside(self, step: Step, slots: Slots, rows: Slots) -> None:
        """Keep some rows of a step, not acknowledged, until the clients of their requests resume them."""
        step.pending_ack.keep(rows.size)
        self.buffered_rows += rows.size
        for slot, row in zip(slots[rows].tolist(), rows.tolist(), strict=True):
            self.at(slot).waiting.append((step, row))

    def take_rows(self, request: Request) -> list[tuple[Step, int]]:
        """Return the rows that wait with a request, and forget them; the caller releases their pending acks."""
        waiting, request.waiting = request.waiting, []
        self.buffered_rows -= len(waiting)
        return waiting

    def drop_rows(self, request: Request) -> None:
        """Drop a request's rows and its prompt's scores."""
        for step, _ in self.take_rows(request):
            step.pending_ack.release()
        for _, pending_ack in request.scores:
            pending_ack.release()
        request.scores = []

    # Changes within a state.

    def skip_to(self, request: Request, position: int) -> None:
        """Note that its client has all tokens before a position."""
        self.next_position[request.slot] = max(position, self.next_position[request.slot])

    def advance(self, slots: Slots, counts: npt.NDArray[np.uint8]) -> None:
        """Count the tokens that each request of a step got."""
        self.next_position[slots] += counts

    def claim(self, request: Request, route: int, owner: int, *, drafts: bool) -> None:
        """Lead a request's rows to the consumer that asked for them, and charge it to its owner."""
        request.is_claimed = True
        request.owner = owner
        self._charge(request, client_payer(owner))
        self.route[request.slot] = route
        self.wants_draft[request.slot] = drafts

    def set_deadline(self, request: Request, deadline: Deadline) -> None:
        """Let a request end at another time, and be due then."""
        request.deadline = deadline
        self.due[request.slot] = deadline.at

    def look_at(self, request: Request, when: float) -> None:
        """Make a request due at a time, in seconds, and not before."""
        self.due[request.slot] = when

    def look_again(self, request: Request, when: float) -> None:
        """Make a request due at a time, in seconds, if it is not due before."""
        self.due[request.slot] = min(self.due[request.slot], when)

    def reserve(self, request: Request, stream: int) -> None:
        """Reserve a decode worker's room for a request that is sent to a prefill worker; NO_STREAM: none."""
        self.decoder[request.slot] = stream
        request.for_decode = None if stream == NO_STREAM else request.generate

    def _charge(self, request: Request, payer: Payer | None) -> None:
        if request.payer is not None:
            of_before = self._charged[request.payer]
            of_before.pop(request.slot)
            if not of_before:
                del self._charged[request.payer]
        request.payer = payer
        if payer is not None:
            self._charged.setdefault(payer, {})[request.slot] = None

    def _add_slot(self) -> None:
        self._requests.append(None)
        if len(self._requests) > self.stream.size:
            for name, value in _EMPTY.items():
                column = getattr(self, name)
                # Columns are counted and searched as a whole: a slot without a request must look like one.
                setattr(self, name, np.concatenate([column, np.full_like(column, value)]))
            self.running = self._running()

    def _running(self) -> RequestColumns:
        return RequestColumns.of(
            streams=self.stream,
            shares=self.route,
            states=self.state,
            positions=self.next_position,
            running=State.RUNNING,
        )


def _can_go_on(generate: Generate) -> bool:
    """Tell whether any worker of the model whose engine continues requests can continue this one."""
    sampling = generate.sampling
    needs_output = sampling.presence_penalty or sampling.frequency_penalty or sampling.bad_words
    is_free = generate.continuation_policy == ContinuationPolicy.CONTINUATION_POLICY_UNSPECIFIED
    return is_free and not (needs_output or sampling.HasField("structured_output"))


def client_payer(owner: int) -> Payer:
    """Return what the requests of a client count against."""
    return "client", owner
