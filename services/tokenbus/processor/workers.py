"""The workers that this processor knows, and what each of them is sent."""

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
    """One life of a worker: its stream, through all of its connections."""

    stream: Stream
    assembler: Assembler
    source: Source
    identity: Identity
    met_at: float
    acknowledged: int = 0
    """The last sequence that it was sent an ack for."""
    alone_since: float | None = None
    """Since when a prefill worker has had no decode worker here."""
    last_turn: int = 0
    """The number of the last new request that it was given, or was to go on with: it breaks ties in dispatch."""
    stalled: float = 0.0
    """For how many seconds its engine had made no progress, as its last heartbeat says, if it was heard since."""
    is_stalled: bool = False
    """Whether its connection is closed, or it shows no progress: it gets no new requests."""
    kv_cache_permille: int | None = None
    """How much of its engine's KV cache was in use at its last heartbeat, in thousandths; None: not known."""
    gone_since: float | None = None
    """When its connection was first found closed, if it has not come back."""
    takes_no_more: bool = False
    """Whether it gets no new requests, because it leaves when those it has are done."""
    held_back: tuple[PendingAck, float] | None = None
    """What has held its stream back for the longest, and since when, while too much waits to be acknowledged."""
    waits_for_room: bool = False
    """Whether its next item brings more requests that no client asked for than there is room for."""
    hellos: int = 0
    """How many of its hellos were answered."""
    reconcile: tuple[int, frozenset[int]] | None = None
    """When the stream has come to that sequence, the worker has only these requests, and what it was sent since."""

    def count(self, step: Step) -> None:
        """Count a step that was handed out, with the rows of it that were."""
        counts, rows = self.stream.counts, step.rows
        counts.steps += 1
        self.source.count(rows)
        counts.incomplete_steps += not step.is_whole
        if rows.draft_token_counts.any():
            counts.speculation.add(rows)
        self.stream.produced_at_ns = rows.header.produced_at_ns


class Workers(Peers[Worker]):
    """All workers that have said hello and are not lost, by their ids and by the numbers of their streams."""

    def __init__(self, settings: ProcessorSettings) -> None:
        super().__init__(ProcessorFrame)
        self._settings = settings
        self.streams = 0
        """How many streams there were: each one's number is below that."""
        self.by_id: dict[str, Worker] = {}
        self.by_stream: dict[int, Worker] = {}
        self.arrivals = 0
        """How often a worker came."""
        self.departed: OrderedDict[str, StreamCounts] = OrderedDict()
        """What was counted of workers that are gone, for as many as may be here, so that a sum misses nothing."""
        self.lost = 0

    def add(self, worker: Worker) -> None:
        """Add a worker whose stream has the next number."""
        self.streams += 1
        self.by_id[worker.stream.worker_id] = worker
        self.by_stream[worker.source.stream] = worker

    def remove(self, worker: Worker) -> None:
        """Forget a worker that is lost, and keep what was counted of it."""
        self.by_id.pop(worker.stream.worker_id, None)
        self.by_stream.pop(worker.source.stream, None)
        self.lost += 1
        self.departed[worker.stream.worker_id] = worker.stream.counts
        if len(self.departed) > self._settings.max_workers:
            self.departed.popitem(last=False)

    @property
    def are_caught_up(self) -> bool:
        """Whether every worker has sent again what it retained when it introduced itself."""
        return all(worker.reconcile is None for worker in self.by_id.values())

    def source_of(self, request_id: int) -> Source | None:
        """Return the stream whose worker said in its handshake that it has a request."""
        sources = (worker.source for worker in self.by_stream.values())
        return next((source for source in sources if request_id in source.owners), None)

    # What they are sent.

    def send(self, known: Worker, frame: Message) -> Outcome:
        """Send a worker a frame."""
        outcome = super().send(known, frame)
        if outcome is Outcome.FULL:
            # A worker that reads nothing: all of it is sent again after its next hello.
            self.disconnect(known)
        return outcome

    def abort(self, stream: int, request_id: int) -> None:
        """Ask a worker to end a request."""
        if (worker := self.by_stream.get(stream)) is not None:
            self.send(worker, ProcessorFrame(abort=Abort(request_id=request_id)))

    def acknowledge(self, worker: Worker, *, at_once: bool = False) -> None:
        """Let a worker forget what has arrived; now and then, as each time costs a message."""
        acks = worker.stream.acks
        acks.advance()
        behind = acks.acknowledged - worker.acknowledged
        if behind and (at_once or behind >= self._settings.credit_items // 8):
            worker.acknowledged = acks.acknowledged
            self.send(worker, ProcessorFrame(ack=Ack(through_sequence=acks.acknowledged)))
