"""Session: one incarnation of a client, which consumes the rows of the client's requests."""

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
"""A client keeps up if it has at most this number of unacknowledged output frames."""
_Piece = tuple[LogprobBatch, LogprobBatch | None]


@dataclass(slots=True, eq=False, kw_only=True)
class Session(KnownPeer):
    """One incarnation of a client, across all of its connections."""

    id: int
    owner: int
    """Owner of the client's requests, which is the same for the client's next incarnation."""
    route: int
    send_queue: SendQueue
    table: RequestTable
    limits: Limits
    on_frame: Callable[["Session"], None]
    is_proven: bool = False
    """Whether the client has proved its identity with a key."""
    roles: frozenset[Role] = frozenset()
    hellos: int = 0
    """Number of completed handshakes."""
    handshakes: float = 0.0
    """Number of recent handshakes at the time `handshakes_at`, for the rate limit on handshakes."""
    handshakes_at: float = 0.0
    wants_status: bool = False
    """Whether a status request is still unanswered."""
    next_status: float = 0.0
    knows_others: bool = False
    """Whether the client knows other processors, so that it gets Room messages and may continue requests elsewhere."""
    room: Room | None = None
    """Last Room message to the client, sent at the time `room_at`, when workers had made `arrivals` handshakes."""
    room_at: float = 0.0
    arrivals: int = 0
    _gathered: dict[PendingAck, list[_Piece]] | None = None
    """Gathered rows of several requests, grouped by the pending ack of their step."""
    _gathered_errors: list[RequestError] = field(default_factory=list)
    """Errors that are sent after the gathered rows."""

    @property
    def keeps_up(self) -> bool:
        """Whether the client is connected, and acknowledges frames about as fast as they arrive."""
        return self.peer is not None and self.send_queue.outputs <= _KEEPS_UP

    def deliver(self, step: Step, slots: Slots, routed: RoutedRows) -> None:
        """Put the client's rows of a step into the send queue, as one frame if the limits on a message allow it."""
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
        """Start to gather rows, so that requests that are resumed together share one frame per step."""
        self._gathered = {}

    def send_gathered(self) -> None:
        gathered, errors = self._gathered or {}, self._gathered_errors
        self._gathered, self._gathered_errors = None, []
        # A request with a prefill worker and a decode worker has rows of two streams, whose step numbers are unrelated.
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
        """Send the error of a request after the gathered rows."""
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
