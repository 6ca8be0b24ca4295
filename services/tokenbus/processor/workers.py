"""The workers of a processor, and the frames that the processor sends to them."""

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
    """One incarnation of a worker with its stream, across all of its connections."""

    stream: Stream
    assembler: Assembler
    source: Source
    identity: Identity
    met_at: float
    acknowledged: int = 0
    """Last sequence that was acknowledged to the worker."""
    no_decode_since: float | None = None
    """Time when this prefill worker lost its last decode worker at this processor, or None."""
    last_turn: int = 0
    """Serial number of the worker's last request; among equally loaded workers, the lowest number is chosen first."""
    stalled: float = 0.0
    """Seconds for which the engine had made no progress, as the worker's last heartbeat reported."""
    is_stalled: bool = False
    """Whether the worker gets no requests because its connection is closed or its engine makes no progress."""
    kv_cache_permille: int | None = None
    """Used part of the engine's KV cache at the last heartbeat, in thousandths, or None if unknown."""
    gone_since: float | None = None
    """Time when the connection was found to be closed, or None."""
    is_draining: bool = False
    """Whether the worker drains, so that it gets no new requests."""
    held_back: tuple[PendingAck, float] | None = None
    """Oldest pending ack and since when it is the oldest, or None while the consumers' buffer is not too full."""
    waits_for_room: bool = False
    """Whether the next item has more unclaimed requests than the table can hold."""
    hellos: int = 0
    """Number of completed handshakes."""
    reconcile: int | None = None
    """Last sequence before the worker's hello, or None after the hello's requests were compared with the table."""

    def count(self, step: Step) -> None:
        counts, rows = self.stream.counts, step.rows
        counts.steps += 1
        counts.tokens += rows.token_ids.size
        counts.incomplete_steps += not step.is_whole
        if rows.draft_token_counts.any():
            counts.speculation.add(rows)
        self.stream.produced_at_ns = rows.header.produced_at_ns


class Workers(Peers[Worker]):
    """The workers that have completed a handshake and are not lost."""

    def __init__(self, settings: ProcessorSettings) -> None:
        super().__init__(ProcessorFrame)
        self._settings = settings
        self.streams = 0
        """Number of the next stream."""
        self.by_id: dict[str, Worker] = {}
        self.by_stream: dict[int, Worker] = {}
        self.arrivals = 0
        """Number of completed handshakes of all workers."""
        self.departed: OrderedDict[str, StreamCounts] = OrderedDict()
        """Counts of up to `max_workers` lost workers, so that the processor's totals never decrease."""
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
        """Return the source whose worker named a request in its last hello, or None."""
        sources = (worker.source for worker in self.by_stream.values())
        return next((source for source in sources if request_id in source.owners), None)

    def send(self, known: Worker, frame: Message) -> Outcome:
        """Send a frame, or disconnect a worker that does not read.

        The worker's next handshake replaces the lost frames.
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

        Because an ack costs a message, it waits until it covers an eighth of the credit, unless `at_once` is set.
        """
        acks = worker.stream.acks
        acks.advance()
        behind = acks.acknowledged - worker.acknowledged
        if behind and (at_once or behind >= self._settings.credit_items // 8):
            worker.acknowledged = acks.acknowledged
            self.send(worker, ProcessorFrame(ack=Ack(through_sequence=acks.acknowledged)))
