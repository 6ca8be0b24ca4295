"""Session: one life of a client, and the consumer of the rows of its requests."""

from collections.abc import Callable
from dataclasses import dataclass, field

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
"""A client with up to this many unacknowledged frames of tokens keeps up."""
_Piece = tuple[LogprobBatch, LogprobBatch | None]


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
    """Whether its list has other processors. Then it is told our room, and may continue requests elsewhere."""
    room: Room | None = None
    """The last Room that was sent to it, with the time and the number of workers' handshakes by then."""
    room_at: float = 0.0
    arrivals: int = 0
    _gathered: dict[PendingAck, list[_Piece]] | None = None
    """Gathered rows of many requests, by step."""
    _gathered_errors: list[RequestError] = field(default_factory=list)
    """Errors that follow the gathered rows."""

    @property
    def keeps_up(self) -> bool:
        """Whether it is connected, and acknowledges frames about as fast as they arrive."""
        return self.peer is not None and self.send_queue.outputs <= _KEEPS_UP

    def deliver(self, step: Step, slots: Slots, routed: RoutedRows) -> None:
        """Put its rows of a step into the send queue, as one frame, or several if a message would exceed the limits."""
        draft = step.draft
        if routed.message and self._gathered is None and len(routed.message) <= self.limits.max_message_bytes:
            self.put(Frame(OUTPUTS, [routed.message], step.pending_ack, routed.request_ids))
            return
        if draft is not None:
            wanted = step.rows.request_ids[routed.rows][self.table.wants_draft[slots[routed.rows]]]
            places = np.flatnonzero(np.isin(draft.request_ids, wanted))
            draft = draft.select(places) if places.size else None
        self.put_outputs(step.rows.select(routed.rows), draft, step.pending_ack)

    def gather(self) -> None:
        """Gather rows from now on, so that many requests that are resumed together share one frame per step."""
        self._gathered = {}

    def send_gathered(self) -> None:
        gathered, errors = self._gathered or {}, self._gathered_errors
        self._gathered, self._gathered_errors = None, []
        # A request that went from a prefill to a decode worker has rows of two streams, and their step numbers say
        # nothing about the order.
        for pending_ack, pieces in sorted(gathered.items(), key=lambda each: each[0].ordinal):
            drafts = [draft for _, draft in pieces if draft is not None]
            target = LogprobBatch.joined([target for target, _ in pieces])
            self.put_outputs(target, LogprobBatch.joined(drafts) if drafts else None, pending_ack)
            pending_ack.release()
        for error in errors:
            self.put_error(error)

    def put_outputs(self, target: LogprobBatch, draft: LogprobBatch | None, pending_ack: PendingAck) -> None:
        if self._gathered is not None:
            if pending_ack not in self._gathered:
                pending_ack.keep()
            self._gathered.setdefault(pending_ack, []).append((target, draft))
            return
        for frame in output_frames(target, draft, pending_ack, self.limits):
            self.put(frame)

    def put(self, frame: Frame) -> None:
        self.send_queue.put(frame)
        self.on_frame(self)

    def put_error(self, error: RequestError) -> None:
        """Send the error of a request, after the gathered rows."""
        if self._gathered is not None:
            self._gathered_errors.append(error)
            return
        self.put(Frame(write_frame(ServerFrame(error=error))))

    def admitted(self, request: Request, admitted: Admitted) -> None:
        admitted.deadline_unix_ms = request.deadline.unix_ms
        self.put(Frame(write_frame(ServerFrame(admitted=admitted))))

    def scored(self, request: Request, chunk: PromptScoresChunk, pending_ack: PendingAck) -> None:
        ids = request.id.to_bytes(8, "little")
        self.put(Frame(write_frame(ServerFrame(prompt_scores=chunk)), (), pending_ack, ids))

    def finish(self, request: Request) -> None:
        request.last_frame = self.route, self.send_queue.last_ordinal


def drafts_of(draft: LogprobBatch, request_id: int) -> LogprobBatch | None:
    found = np.flatnonzero(draft.request_ids == np.uint64(request_id))
    return draft.select(found) if found.size else None
