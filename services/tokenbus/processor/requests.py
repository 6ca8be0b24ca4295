"""The table of all requests and their states, with array columns so that a step needs only a few operations."""

from collections import OrderedDict
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus.delivery.ack_tracker import PendingAck
from tokenbus.delivery.slots import SlotMap, Slots
from tokenbus.delivery.step import Step
from tokenbus_contracts.generated.request_pb2 import ContinuationPolicy, Generate, PromptScoresChunk, RequestError
from tokenbus_contracts.native import RequestColumns

NO_STREAM = -1
NO_OWNER = 0
UNCLAIMED = 0
"""Route of requests without a client, whose rows wait until a client resumes the request."""
UNROUTED = -1
"""Route of requests whose rows are delivered only by `steps()`."""
Payer = tuple[str, int | str]
"""The peer whose limit includes a request: the client, or for an unclaimed request the worker's key or the worker."""


class State(IntEnum):
    """State of a request."""

    CLOSED = 0
    """The request is not in the table."""
    QUEUED = 1
    """The request waits for a worker."""
    RUNNING = 2
    """One worker has the request, and the worker's stream brings the rows."""
    RESUMED = 3
    """The client resumed the request before a worker named it, for example after a restart of the processor."""
    ENDED = 4
    """The request ended before its client claimed it, and its rows wait for the client."""


class TransitionError(Exception):
    """A defect of the processor: the state of a request does not allow a transition."""

    def __init__(self, request_id: int, state: State, to: State) -> None:
        super().__init__(f"request {request_id:016x}: {to.name.lower()} does not follow {state.name.lower()}")


class Deadline(NamedTuple):
    """A request's deadline, as seconds of the processor's clock and as milliseconds since 1970 UTC."""

    at: float
    unix_ms: int = 0
    after_ms: int = 0
    """Remaining time in milliseconds when the deadline was set."""


@dataclass(slots=True, frozen=True)
class Source:
    """The worker's stream from which a step came."""

    stream: int
    name: str
    is_resumed: bool
    """Whether the stream is older than this processor."""
    owners: dict[int, int] = field(default_factory=dict, compare=False)
    """Owners of the requests that the worker's last hello named, by request id; some requests may have ended."""
    key: str = ""
    """Name of the worker's proven key, or empty without a key."""

    @property
    def payer(self) -> Payer:
        """Payer of unclaimed requests: the worker's key, which several workers may share, or else its stream."""
        return ("key", self.key) if self.key else ("worker", self.stream)


@dataclass(slots=True, eq=False)
class Request:
    """The properties of one request that are not columns of the table."""

    id: int
    slot: int
    deadline: Deadline
    generate: Generate | None = None
    """Message for the worker, or None once the worker has admitted the request."""
    sent_after: int = 0
    """Number of the worker's handshakes at the time when the request was sent."""
    for_decode: Generate | None = None
    """Message for the decode worker while a prefill worker has the request."""
    transfer_state: bytes = b""
    """State that the prefill worker transfers to the decode worker."""
    weight_version: int = 0
    """Weight version of the worker that admitted the request."""
    is_claimed: bool = False
    """Whether the request has a consumer."""
    is_continuable: bool = False
    """Whether the client can continue the request at any other worker of the model."""
    aborted_at: float | None = None
    waiting: list[tuple[Step, int]] = field(default_factory=list)
    """Rows that wait for the client; each entry is a step and a row number in the step."""
    scores: list[tuple[PromptScoresChunk, PendingAck]] = field(default_factory=list)
    """Prompt scores that wait for the client."""
    error: RequestError | None = None
    """Error that ended the request before the client claimed it."""
    owner: int = NO_OWNER
    """The client that may resume or end the request, in any of the client's incarnations."""
    payer: Payer | None = None
    asked_after: int = 0
    """Number of the client's handshakes when the client sent the request.

    Zero means that the client sent it to an earlier incarnation of the processor.
    """
    last_frame: tuple[int, int] | None = None
    """Route of the session that got the last row, and the ordinal of the row's frame in that session's send queue."""


@dataclass(slots=True, frozen=True)
class Ended:
    """The end of a request."""

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
"""Column values of an empty slot."""


class RequestTable:
    """All open requests, and a limited number of ended requests.

    Each column has one value per slot. Any module may read the columns, but only these methods write them.
    """

    def __init__(self, max_requests: int, ended_requests: int, per_peer: int) -> None:
        self._per_peer = per_peer
        self._charged: dict[Payer, dict[int, None]] = {}
        self._slots = SlotMap()
        self._requests: list[Request | None] = []
        self._ended: OrderedDict[int, Ended] = OrderedDict()
        self._ended_at_clients: OrderedDict[int, int] = OrderedDict()
        """Owners by request id of requests that this processor did not know when their clients reported the end."""
        self._max_requests = max_requests
        self._ended_requests = ended_requests
        self.next_position = np.zeros(64, np.int64)
        self.stream = np.full(64, NO_STREAM, np.int32)
        self.decoder = np.full(64, NO_STREAM, np.int32)
        """Stream of the decode worker that reserves capacity for a request while a prefill worker has the request."""
        self.state = np.zeros(64, np.uint8)
        self.route = np.zeros(64, np.int32)
        self.wants_draft = np.ones(64, np.bool_)
        self.due = np.full(64, np.inf)
        """Time at which to check next whether a request is overdue."""
        self.buffered_rows = 0
        """Number of rows that wait for clients."""
        self.running = self._running()
        """Columns that the native pass over a step reads."""

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def is_full(self) -> bool:
        return len(self._slots) >= self._max_requests

    def limit_for(self, payer: Payer) -> str:
        """Return the limit that forbids another request of a payer, or an empty string if the request is allowed."""
        if self.is_full:
            return f"open requests: at most {self._max_requests}"
        if not self.room_for(payer):
            return f"open requests of one {payer[0]}: at most {self._per_peer}"
        return ""

    def room_for(self, payer: Payer) -> int:
        return max(0, min(self._per_peer - self.charged_to(payer), self._max_requests - len(self)))

    def charged_to(self, payer: Payer) -> int:
        return len(self._charged.get(payer, ()))

    def oldest_unclaimed(self) -> Request | None:
        """Return the oldest unclaimed request of the payer with the most unclaimed requests."""
        payers = [payer for payer in self._charged if payer[0] != "client"]
        if not payers:
            return None
        return self.at(next(iter(self._charged[max(payers, key=self.charged_to)])))

    def get(self, request_id: int) -> Request | None:
        slot = self._slots.get(request_id)
        return None if slot is None else self._requests[slot]

    def at(self, slot: int) -> Request:
        request = self._requests[slot]
        if request is None:
            raise KeyError(slot)
        return request

    def state_of(self, request: Request) -> State:
        return State(self.state[request.slot])

    def stream_of(self, request: Request) -> int:
        return int(self.stream[request.slot])

    def ended(self, request_id: int) -> Ended | None:
        return self._ended.get(request_id)

    def has_ended_at_client(self, request_id: int) -> bool:
        return request_id in self._ended_at_clients

    def knows(self, request_id: int) -> bool:
        return request_id in self._slots or request_id in self._ended or request_id in self._ended_at_clients

    def note_end_at_client(self, request_id: int, owner: int) -> None:
        """Record that an unknown request has ended at a client; later reports by other clients are ignored."""
        self._ended_at_clients.setdefault(request_id, owner)
        if len(self._ended_at_clients) > self._ended_requests:
            self._ended_at_clients.popitem(last=False)

    def forget_end_at_client(self, request_id: int, owner: int) -> None:
        """Forget that a request has ended at a client, because the client reuses the id."""
        if self._ended_at_clients.get(request_id) == owner:
            del self._ended_at_clients[request_id]

    def forget_end_at_other_client(self, request_id: int, owner: int) -> None:
        """Forget that a request has ended at a client, unless that client is the owner that a worker's hello names."""
        if owner == NO_OWNER or self._ended_at_clients.get(request_id) != owner:
            self._ended_at_clients.pop(request_id, None)

    def forget_end(self, request_id: int) -> None:
        """Forget that a request has ended, because a worker may still send its rows."""
        self._ended.pop(request_id, None)

    def open_requests(self) -> list[Request]:
        """Return all open requests, oldest first."""
        return [self.at(slot) for slot in self._slots]

    def of_stream(self, stream: int) -> list[Request]:
        return [self.at(slot) for slot in np.flatnonzero(self.stream == stream).tolist()]

    def of_route(self, route: int) -> list[Request]:
        return [self.at(slot) for slot in np.flatnonzero(self.route == route).tolist()]

    def resumed(self) -> list[Request]:
        return [self.at(slot) for slot in np.flatnonzero(self.state == State.RESUMED).tolist()]

    def load_of(self, stream: int) -> int:
        """Return the number of a stream's requests, including those for which it reserves capacity."""
        return int(np.count_nonzero(self.stream == stream)) + int(np.count_nonzero(self.decoder == stream))

    def requests_of(self, route: int, stream: int) -> int:
        return int(np.count_nonzero((self.stream == stream) & (self.route == route)))

    def slots_of(self, request_ids: npt.NDArray[np.uint64]) -> Slots:
        return self._slots.find(request_ids)

    # Transitions.

    def open(self, request_id: int, position: int, stream: int, state: State, deadline: Deadline) -> Request:
        """Open a request. The caller must check the limits first."""
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
        state = State.QUEUED if stream == NO_STREAM else State.RUNNING
        position = len(generate.continuation.token_ids)
        request = self.open(generate.request_id, position, stream, state, deadline)
        request.generate = deepcopy(generate)
        request.generate.owner = owner
        request.generate.deadline_unix_ms = deadline.unix_ms
        request.is_continuable = _is_continuable(generate)
        self.claim(request, route, owner, drafts=generate.include_draft_logprobs)
        return request

    def open_unclaimed(self, request_id: int, position: int, source: Source, deadline: Deadline, route: int) -> Request:
        request = self.open(request_id, position, source.stream, State.RUNNING, deadline)
        request.owner = source.owners.get(request_id, NO_OWNER)
        request.is_claimed = route != UNCLAIMED
        self._charge(request, source.payer)
        self.route[request.slot] = route
        return request

    def resume(self, request_id: int, position: int, now: float) -> Request:
        """Open a request that a client resumes before any worker has reported the request."""
        return self.open(request_id, position, NO_STREAM, State.RESUMED, Deadline(now))

    def dispatch(self, request: Request, stream: int) -> None:
        self._run(request, stream, State.QUEUED)

    def requeue(self, request: Request) -> None:
        """Queue a request again before its worker has admitted it."""
        self._move(request, State.QUEUED, State.RUNNING)
        self.stream[request.slot] = self.decoder[request.slot] = NO_STREAM

    def decode(self, request: Request, stream: int, generate: Generate) -> None:
        """Move a request from its prefill worker to a decode worker's stream."""
        self._run(request, stream, State.RUNNING)
        self.decoder[request.slot] = NO_STREAM
        request.generate, request.for_decode, request.transfer_state = generate, None, b""

    def assign(self, request: Request, stream: int) -> None:
        """Assign a request to the stream of the worker that has it."""
        self._run(request, stream, State.QUEUED, State.RESUMED)

    def end(self, request: Request, error: RequestError | None) -> None:
        """End an unclaimed request whose rows are kept for its client."""
        self._move(request, State.ENDED, State.RUNNING)
        request.error = error
        self.stream[request.slot] = NO_STREAM

    def close(self, request: Request, error: RequestError | None) -> None:
        """Remove a request from the table, and remember how it ended."""
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

    # Rows wait for clients because after a restart, workers may return before clients.

    def keep_rows(self, step: Step, slots: Slots, rows: Slots) -> None:
        """Keep rows of a step unacknowledged until the clients of these rows resume their requests."""
        step.pending_ack.keep(rows.size)
        self.buffered_rows += rows.size
        for slot, row in zip(slots[rows].tolist(), rows.tolist(), strict=True):
            self.at(slot).waiting.append((step, row))

    def take_rows(self, request: Request) -> list[tuple[Step, int]]:
        """Remove and return the waiting rows of a request; the caller releases the rows' pending acks."""
        waiting, request.waiting = request.waiting, []
        self.buffered_rows -= len(waiting)
        return waiting

    def drop_rows(self, request: Request) -> None:
        for step, _ in self.take_rows(request):
            step.pending_ack.release()
        for _, pending_ack in request.scores:
            pending_ack.release()
        request.scores = []

    def skip_to(self, request: Request, position: int) -> None:
        """Advance a request to a position, because the client has all earlier tokens."""
        self.next_position[request.slot] = max(position, self.next_position[request.slot])

    def advance(self, slots: Slots, counts: npt.NDArray[np.uint8]) -> None:
        self.next_position[slots] += counts

    def claim(self, request: Request, route: int, owner: int, *, drafts: bool) -> None:
        """Route the rows of a request to a consumer, and charge the request to its owner."""
        request.is_claimed = True
        request.owner = owner
        self._charge(request, client_payer(owner))
        self.route[request.slot] = route
        self.wants_draft[request.slot] = drafts

    def set_deadline(self, request: Request, deadline: Deadline) -> None:
        request.deadline = deadline
        self.due[request.slot] = deadline.at

    def check_at(self, request: Request, when: float) -> None:
        self.due[request.slot] = when

    def reserve(self, request: Request, stream: int) -> None:
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
                # Columns are searched as a whole, so new slots must look empty.
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


def _is_continuable(generate: Generate) -> bool:
    """Return whether any worker of its model can continue a request, if the worker's engine supports continuations."""
    sampling = generate.sampling
    needs_output = sampling.presence_penalty or sampling.frequency_penalty or sampling.bad_words
    is_free = generate.continuation_policy == ContinuationPolicy.CONTINUATION_POLICY_UNSPECIFIED
    return is_free and not (needs_output or sampling.HasField("structured_output"))


def client_payer(owner: int) -> Payer:
    return "client", owner
