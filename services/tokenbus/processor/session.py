"""Session: one life of a client, and the consumer of the rows of its requests."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from heapq import heappop, heappush

import numpy as np

from tokenbus.bus import Role
from tokenbus.delivery import PendingAck, Step
from tokenbus.delivery.slots import Slots
from tokenbus.processor.client_frames import OUTPUTS, Frame, output_frames
from tokenbus.processor.connections import KnownPeer
from tokenbus.processor.requests import Request, RequestTable
from tokenbus.processor.routed_rows import RoutedRows
from tokenbus.processor.send_queue import SendQueue
from tokenbus_contracts import Limits, LogprobBatch
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.client_pb2 import Room, ServerFrame
from tokenbus_contracts.generated.request_pb2 import Admitted, PromptScoresChunk, RequestError

_KEEPS_UP = 64
"""Unacknowledged frames with tokens up to which a client keeps up."""
_Piece = tuple[LogprobBatch, LogprobBatch | None]


class _Gathered:
    """Rows of many requests by step, and errors after them."""

    def __init__(self) -> None:
        self._pieces: dict[PendingAck, list[_Piece]] = {}
        self._order: TopologicalSorter[PendingAck] = TopologicalSorter()
        self._latest: dict[int, PendingAck] = {}
        self.errors: list[RequestError] = []

    def add(self, target: LogprobBatch, draft: LogprobBatch | None, pending_ack: PendingAck) -> None:
        """Add rows, the rows of each request in their order. The step stays unacknowledged until they are sent."""
        if pending_ack not in self._pieces:
            pending_ack.keep()
            self._pieces[pending_ack] = []
            self._order.add(pending_ack)
        self._pieces[pending_ack].append((target, draft))
        for request_id in target.request_ids.tolist():
            before = self._latest.get(request_id)
            if before is not None and before is not pending_ack:
                self._order.add(pending_ack, before)
            self._latest[request_id] = pending_ack

    def in_order(self) -> Iterator[tuple[PendingAck, list[_Piece]]]:
        """Yield the rows of each step: each request's in their order, and the steps of one stream in theirs.

        A request has rows of two streams if it moved from a prefill to a decode worker. Their step numbers say nothing
        about the order, so the steps are sorted topologically.
        """
        self._order.prepare()
        ready: list[tuple[int, int, PendingAck]] = []
        while self._order.is_active():
            for pending_ack in self._order.get_ready():
                heappush(ready, (pending_ack.last_sequence, id(pending_ack), pending_ack))
            _, _, first = heappop(ready)
            yield first, self._pieces[first]
            self._order.done(first)


@dataclass(slots=True, eq=False, kw_only=True)
class Session(KnownPeer):
    """One life of a client, over all of its connections."""

    id: int
    owner: int
    """The owner of its requests, which is the same for the client's next life."""
    route: int
    send_queue: SendQueue
    table: RequestTable
    limits: Limits
    on_frame: Callable[["Session"], None]
    is_proven: bool = False
    """Whether a key proves its identity."""
    roles: frozenset[Role] = frozenset()
    hellos: int = 0
    """Completed handshakes."""
    handshakes: float = 0.0
    """Handshakes that counted against its rate limit at the last one."""
    handshakes_at: float = 0.0
    wants_status: bool = False
    """Whether a status request has not been answered."""
    next_status: float = 0.0
    knows_others: bool = False
    """Whether it has other processors in its list, so that it is told our room and may continue requests there."""
    room: Room | None = None
    """The last Room that it was sent, with the time and the count of workers' handshakes by then."""
    room_at: float = 0.0
    arrivals: int = 0
    requests: set[int] = field(default_factory=set)
    _gathered: "_Gathered | None" = None

    @property
    def keeps_up(self) -> bool:
        """Whether it is connected, and acknowledges frames about as fast as they come."""
        return self.peer is not None and self.send_queue.outputs <= _KEEPS_UP

    def deliver(self, step: Step, slots: Slots, routed: RoutedRows) -> None:
        """Put its rows of a step into the send queue, as one frame, or more if a message would exceed the limits."""
        draft = step.draft
        if draft is None and self._gathered is None:
            for message, ids in routed.messages(self.limits):
                self.put(Frame(OUTPUTS, [message], step.pending_ack, ids))
            return
        if draft is not None:
            wanted = step.rows.request_ids[routed.rows][self.table.wants_draft[slots[routed.rows]]]
            places = np.flatnonzero(np.isin(draft.request_ids, wanted))
            draft = draft.select(places) if places.size else None
        self.put_outputs(step.rows.select(routed.rows), draft, step.pending_ack)

    def gather(self) -> None:
        """Gather rows from now on, so that many requests that are resumed together share one frame a step."""
        if self._gathered is None:
            self._gathered = _Gathered()

    def send_gathered(self) -> None:
        gathered, self._gathered = self._gathered or _Gathered(), None
        for pending_ack, pieces in gathered.in_order():
            drafts = [draft for _, draft in pieces if draft is not None]
            target = LogprobBatch.joined([target for target, _ in pieces])
            self.put_outputs(target, LogprobBatch.joined(drafts) if drafts else None, pending_ack)
            pending_ack.release()
        for error in gathered.errors:
            self.put_error(error)

    def put_outputs(self, target: LogprobBatch, draft: LogprobBatch | None, pending_ack: PendingAck) -> None:
        if self._gathered is not None:
            self._gathered.add(target, draft, pending_ack)
            return
        for frame in output_frames(target, draft, pending_ack, self.limits):
            self.put(frame)

    def put(self, frame: Frame) -> None:
        self.send_queue.put(frame)
        self.on_frame(self)

    def put_error(self, error: RequestError) -> None:
        """Send the error of a request, after the gathered rows."""
        if self._gathered is not None:
            self._gathered.errors.append(error)
            return
        self.put(Frame(write_frame(ServerFrame(error=error))))

    def admitted(self, request: Request, admitted: Admitted) -> None:
        admitted.deadline_unix_ms = request.deadline.unix_ms
        self.put(Frame(write_frame(ServerFrame(admitted=admitted))))

    def scored(self, request: Request, chunk: PromptScoresChunk, pending_ack: PendingAck) -> None:
        ids = request.id.to_bytes(8, "little")
        self.put(Frame(write_frame(ServerFrame(prompt_scores=chunk)), (), pending_ack, ids))

    def finish(self, request: Request) -> None:
        """Forget a request whose last row is in the send queue."""
        request.last_frame = self.route, self.send_queue.last_ordinal
        self.requests.discard(request.id)

    def fail(self, request: Request, error: RequestError) -> None:
        self.requests.discard(request.id)
        self.put_error(error)


def drafts_of(draft: LogprobBatch, request_id: int) -> LogprobBatch | None:
    found = np.flatnonzero(draft.request_ids == np.uint64(request_id))
    return draft.select(found) if found.size else None
