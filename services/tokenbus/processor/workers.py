"""The workers of this processor, and the frames that it sends them."""

from collections import OrderedDict
from dataclasses import dataclass

from google.protobuf.message import Message

from tokenbus.bus import Identity, Outcome
from tokenbus.delivery import PendingAck, Step
from tokenbus.processor.assembly import Assembler
from tokenbus.processor.connections import KnownPeer, Peers
from tokenbus.processor.requests import Source
from tokenbus.processor.stream import Stream, StreamCounts
from tokenbus.settings import ProcessorSettings
from tokenbus_contracts.generated.request_pb2 import Abort
from tokenbus_contracts.generated.stream_pb2 import Ack, ProcessorFrame


@dataclass(slots=True, eq=False, kw_only=True)
class Worker(KnownPeer):
    """One life of a worker: its stream, across all of its connections."""

    stream: Stream
    assembler: Assembler
    source: Source
    identity: Identity
    met_at: float
    acknowledged: int = 0
    """The sequence of the last ack."""
    no_decode_since: float | None = None
    """The time since which this prefill worker has had no decode worker here."""
    last_turn: int = 0
    """The number of the last request dispatched to it, which decides between equally loaded workers."""
    stalled: float = 0.0
    """Seconds without progress of its engine, according to its last heartbeat."""
    is_stalled: bool = False
    """Whether it gets no new requests because its connection is closed, or its engine makes no progress."""
    kv_cache_permille: int | None = None
    """The share of its engine's KV cache in use at its last heartbeat, in thousandths; None: unknown."""
    gone_since: float | None = None
    """When its connection was found to be closed."""
    is_draining: bool = False
    """Whether it drains: it gets no new requests."""
    held_back: tuple[PendingAck, float] | None = None
    """The oldest pending ack while the consumers' buffer is too full, and since when it has been the oldest."""
    waits_for_room: bool = False
    """Whether its next item has more unclaimed requests than the table has room for."""
    hellos: int = 0
    """Completed handshakes."""
    reconcile: int | None = None
    """The last sequence before its hello; None after the requests that the hello named were reconciled."""

    def count(self, step: Step) -> None:
        counts, rows = self.stream.counts, step.rows
        counts.steps += 1
        counts.tokens += rows.token_ids.size
        counts.incomplete_steps += not step.is_whole
        if rows.draft_token_counts.any():
            counts.speculation.add(rows)
        self.stream.produced_at_ns = rows.header.produced_at_ns


class Workers(Peers[Worker]):
    """The workers that completed a handshake, until they are lost."""

    def __init__(self, settings: ProcessorSettings) -> None:
        super().__init__(ProcessorFrame)
        self._settings = settings
        self.streams = 0
        """The number of the next stream."""
        self.by_id: dict[str, Worker] = {}
        self.by_stream: dict[int, Worker] = {}
        self.arrivals = 0
        """Completed handshakes of all workers."""
        self.departed: OrderedDict[str, StreamCounts] = OrderedDict()
        """The counts of lost workers, at most `max_workers`, so that sums do not drop."""
        self.lost = 0

    def add(self, worker: Worker) -> None:
        self.streams += 1
        self.by_id[worker.stream.worker_id] = worker
        self.by_stream[worker.source.stream] = worker

    def remove(self, worker: Worker) -> None:
        self.by_id.pop(worker.stream.worker_id, None)
        self.by_stream.pop(worker.source.stream, None)
        self.lost += 1
        self.departed[worker.stream.worker_id] = worker.stream.counts
        if len(self.departed) > self._settings.max_workers:
            self.departed.popitem(last=False)

    def source_of(self, request_id: int) -> Source | None:
        """Return the stream whose worker named a request in its hello."""
        sources = (worker.source for worker in self.by_stream.values())
        return next((source for source in sources if request_id in source.owners), None)

    def send(self, known: Worker, frame: Message) -> Outcome:
        """Send a frame.

        If the worker does not read, disconnect it: after its next hello the lost frames are made up for.
        """
        outcome = super().send(known, frame)
        if outcome is Outcome.FULL:
            self.disconnect(known)
        return outcome

    def abort(self, stream: int, request_id: int) -> None:
        if (worker := self.by_stream.get(stream)) is not None:
            self.send(worker, ProcessorFrame(abort=Abort(request_id=request_id)))

    def acknowledge(self, worker: Worker, *, at_once: bool = False) -> None:
        """Acknowledge the items that no consumer needs.

        Each ack is a message, so an ack waits until it covers a share of the credit.
        """
        acks = worker.stream.acks
        acks.advance()
        behind = acks.acknowledged - worker.acknowledged
        if behind and (at_once or behind >= self._settings.credit_items // 8):
            worker.acknowledged = acks.acknowledged
            self.send(worker, ProcessorFrame(ack=Ack(through_sequence=acks.acknowledged)))
