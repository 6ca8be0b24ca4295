"""A client as the processor knows it: its requests, and the rows on their way to it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from heapq import heappop, heappush

import numpy as np

from tokenbus.delivery import PendingAck, Step
from tokenbus.delivery.slots import Slots
from tokenbus.processor.client_frames import OUTPUTS, Frame, output_frames
from tokenbus.processor.connections import KnownPeer
from tokenbus.processor.requests import Request, RequestTable
from tokenbus.processor.send_queue import SendQueue
from tokenbus.processor.step_parts import Part
from tokenbus_contracts import Limits, LogprobBatch
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.client_pb2 import Room, ServerFrame
from tokenbus_contracts.generated.request_pb2 import Admitted, PromptScoresChunk, RequestError

_KEEPS_UP = 64
"""How many frames with tokens a client that keeps up may not have acknowledged yet."""
_Piece = tuple[LogprobBatch, LogprobBatch | None]


class _Gathered:
    """Rows of many requests, by step: a request has those of its prefill and its decode worker."""

    def __init__(self) -> None:
        self._pieces: dict[PendingAck, list[_Piece]] = {}
        self._order: TopologicalSorter[PendingAck] = TopologicalSorter()
        self._latest: dict[int, PendingAck] = {}
        self.errors: list[RequestError] = []
        """What its requests ended with, to be sent behind their rows."""

    def add(self, target: LogprobBatch, draft: LogprobBatch | None, pending_ack: PendingAck) -> None:
        """Take rows, those of each request in its order; their step stays unacknowledged as long as they are here."""
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
        """Yield each step's rows after those that its requests had before, and the steps of one stream in their order.

        Numbers of two streams say nothing of which came first.
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
    """One life of a client, through all of its connections; takes the rows of its requests."""

    id: int
    owner: int
    """The client, as requests know their owners: the same for the client's next life."""
    route: int
    send_queue: SendQueue
    table: RequestTable
    limits: Limits
    on_frame: Callable[["Session"], None]
    is_proven: bool = False
    """Whether a key of the transport proves its identity."""
    may_ask: bool = True
    may_watch: bool = True
    may_control: bool = True
    hellos: int = 0
    """How many of its hellos were answered."""
    handshakes: float = 0.0
    """How many handshakes count against its rate limit, as of the last one."""
    shaken_at: float = 0.0
    wants_status: bool = False
    """Whether a status request has not been answered."""
    next_status: float = 0.0
    knows_others: bool = False
    """Whether it has other processors: it hears how much room there is here, and may continue requests there."""
    room: Room | None = None
    """The last Room that it was sent, when, and how many workers had come by then."""
    room_at: float = 0.0
    arrivals: int = 0
    requests: set[int] = field(default_factory=set)
    _gathered: "_Gathered | None" = None

    @property
    def is_idle(self) -> bool:
        """Whether it has no request, and nothing waits for it."""
        return not self.requests and not len(self.send_queue)

    @property
    def keeps_up(self) -> bool:
        """Whether it is there, and acknowledges what it is sent about as fast as it comes."""
        return self.peer is not None and self.send_queue.outputs <= _KEEPS_UP

    def give(self, step: Step, slots: Slots, part: Part) -> None:
        """Take a part of a step, as one frame, or more where a message may not have all of its rows."""
        draft = step.draft
        if draft is None and self._gathered is None:
            for message, ids in part.messages(self.limits):
                self.put(Frame(OUTPUTS, [message], step.pending_ack, ids))
            return
        if draft is not None:
            wanted = step.rows.request_ids[part.rows][self.table.wants_draft[slots[part.rows]]]
            places = np.flatnonzero(np.isin(draft.request_ids, wanted))
            draft = draft.select(places) if places.size else None
        self.put_outputs(step.rows.select(part.rows), draft, step.pending_ack)

    def gather(self) -> None:
        """Keep what comes from now on, to send it one frame a step: many requests are taken up again at once."""
        if self._gathered is None:
            self._gathered = _Gathered()

    def send_gathered(self) -> None:
        """Send what was gathered, each request's steps in their order."""
        gathered, self._gathered = self._gathered or _Gathered(), None
        for pending_ack, pieces in gathered.in_order():
            drafts = [draft for _, draft in pieces if draft is not None]
            target = LogprobBatch.joined([target for target, _ in pieces])
            self.put_outputs(target, LogprobBatch.joined(drafts) if drafts else None, pending_ack)
            pending_ack.release()
        for error in gathered.errors:
            self.put_error(error)

    def put_outputs(self, target: LogprobBatch, draft: LogprobBatch | None, pending_ack: PendingAck) -> None:
        """Send rows of a step."""
        if self._gathered is not None:
            self._gathered.add(target, draft, pending_ack)
            return
        for frame in output_frames(target, draft, pending_ack, self.limits):
            self.put(frame)

    def put(self, frame: Frame) -> None:
        """Send a frame, as soon as the window allows."""
        self.send_queue.put(frame)
        self.on_frame(self)

    def put_error(self, error: RequestError) -> None:
        """Say how a request ended, or why it was not taken: behind the rows that are gathered."""
        if self._gathered is not None:
            self._gathered.errors.append(error)
            return
        self.put(Frame(write_frame(ServerFrame(error=error))))

    def admitted(self, request: Request, admitted: Admitted) -> None:
        """Say which worker took a request, and until when it may run."""
        admitted.deadline_unix_ms = request.deadline.unix_ms
        self.put(Frame(write_frame(ServerFrame(admitted=admitted))))

    def scored(self, request: Request, chunk: PromptScoresChunk, pending_ack: PendingAck) -> None:
        """Send what the model says of some of a prompt's tokens."""
        ids = request.id.to_bytes(8, "little")
        self.put(Frame(write_frame(ServerFrame(prompt_scores=chunk)), (), pending_ack, ids))

    def finish(self, request: Request) -> None:
        """Learn that a request has had its last row, which says so itself."""
        request.last_frame = self.route, self.send_queue.last_ordinal
        self.requests.discard(request.id)

    def fail(self, request: Request, error: RequestError) -> None:
        """Learn that a request ended with an error."""
        self.requests.discard(request.id)
        self.put_error(error)


def drafts_of(draft: LogprobBatch, request_id: int) -> LogprobBatch | None:
    """Return what was drafted for one request, or None."""
    found = np.flatnonzero(draft.request_ids == np.uint64(request_id))
    return draft.select(found) if found.size else None
