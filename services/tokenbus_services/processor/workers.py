"""The processor's side of the stream protocol: who may publish, in which order, with how much credit."""

import hmac
from collections import Counter, OrderedDict
from itertools import count, repeat

from tokenbus_contracts import ContractError, Rule
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.request_pb2 import Abort, Generate
from tokenbus_contracts.generated.stream_pb2 import (
    Ack,
    Credit,
    GapReason,
    Goodbye,
    GoodbyeReason,
    Heartbeat,
    Hello,
    ProcessorFrame,
    Refusal,
    RefusalReason,
    ReplayRequest,
    Welcome,
    WorkerFrame,
)
from tokenbus_contracts.schema import MINOR
from tokenbus_services.bus import Identity, Outcome
from tokenbus_services.logs import DeduplicatedLog, logger
from tokenbus_services.processor.assembly import Assembler
from tokenbus_services.processor.dead_letters import DeadLetters
from tokenbus_services.processor.intake import Intake
from tokenbus_services.processor.peers import Peers
from tokenbus_services.processor.requests import NO_OWNER, Source
from tokenbus_services.processor.stream import Fate, Stream, StreamCounts
from tokenbus_services.processor.unknown_peers import UnknownPeers
from tokenbus_services.processor.worker import (
    MOST_SEQUENCE,
    RefusedError,
    Worker,
    check_hello,
    protocol_error,
    takes_over,
)
from tokenbus_services.settings import Settings

_log = logger("processor")
_MOST_EPOCHS = 1024
_SILENCE = 1.5
"""How many of a heartbeat's intervals without a word are more than chance."""
_NS = 1_000_000_000


class WorkerConnections:
    """Takes what workers send, and sends what they are to know. Without sockets, and without a clock of its own."""

    def __init__(
        self,
        settings: Settings,
        intake: Intake,
        dead_letters: DeadLetters,
        peers: Peers,
    ) -> None:
        """Take where items go, where refused frames go, and the transport's side of the peers."""
        self._settings = settings
        self._intake = intake
        self._dead_letters = dead_letters
        self._peers = peers
        self._by_peer: dict[bytes, Worker] = {}
        self._fenced: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """The oldest epoch of each worker that left or was lost that may come now, and until when that holds."""
        self._streams = count()
        self._repeated_log = DeduplicatedLog()
        self._interval = settings.bus.heartbeat_interval_ms / 1000
        self._unknown_peers = UnknownPeers(self._interval)
        self._timeout = settings.bus.heartbeat_timeout_ms / 1000
        self.by_id: dict[str, Worker] = {}
        self.by_stream: dict[int, Worker] = {}
        self.departed: OrderedDict[str, StreamCounts] = OrderedDict()
        """What was counted of workers that are gone, for as many as may be here: who adds it up misses nothing."""
        self.refused = 0
        self.refusals: Counter[str] = Counter()
        """How many peers were refused, by why."""
        self.failed_ticks = 0
        self.lost = 0
        self.is_draining = False

    @property
    def are_caught_up(self) -> bool:
        """Whether every worker has sent again what it retained when it introduced itself."""
        return all(worker.reconcile is None for worker in self.by_id.values())

    # What comes in.

    def receive(self, peer: bytes, parts: list[bytes], now: float) -> None:
        """Take one message of a peer; whatever it is, it ends nothing but itself."""
        worker = self._by_peer.get(peer)
        try:
            self._take(peer, worker, parts, now)
        except RefusedError as refused:
            self._refuse(peer, worker, refused)
        except ContractError as error:
            self.refused += 1
            name = worker.stream.name if worker is not None else "unknown peer"
            self._dead_letters.keep(parts[-1] if parts else b"", error, name)
            self._repeated_log.begin(
                ("frame", name), _log.warning, "frame refused", reason=str(error), **_names(worker)
            )
            if worker is None:
                self._tell_refused(peer, protocol_error(error))

    def _take(self, peer: bytes, worker: Worker | None, parts: list[bytes], now: float) -> None:
        if not parts:
            raise ContractError("message", "one part, and an item's payload", 0, rule=Rule.LENGTH)
        frame = read_frame(WorkerFrame, parts[0])
        body = frame.WhichOneof("body")
        if body == "hello":
            self._hello(peer, frame.epoch, frame.hello, now)
        elif worker is None:
            self._stranger(peer, now)
        elif frame.epoch != worker.stream.epoch:
            raise ContractError("epoch", f"{worker.stream.epoch}, as in its hello", frame.epoch)
        elif body is not None:
            self._mind_silence(worker, now)
            worker.last_heard = now
            self._frame(worker, frame, body, parts, now)

    def _frame(self, worker: Worker, frame: WorkerFrame, body: str, parts: list[bytes], now: float) -> None:
        expected = 2 if body == "item" else 1
        if len(parts) != expected:
            raise ContractError("message", f"{expected} parts", len(parts), rule=Rule.LENGTH)
        match body:
            case "item":
                self._item(worker, frame, parts[1], now)
            case "gap":
                if frame.gap.last_sequence < frame.gap.first_sequence:
                    limit = frame.gap.first_sequence
                    raise ContractError("gap.last_sequence", limit, frame.gap.last_sequence, rule=Rule.MIN)
                if frame.gap.last_sequence > MOST_SEQUENCE:
                    raise ContractError("gap.last_sequence", MOST_SEQUENCE, frame.gap.last_sequence, rule=Rule.MAX)
                keys = frozenset(frame.gap.request_keys)
                worker.stream.declare_lost(frame.gap.first_sequence, frame.gap.last_sequence, frame.gap.reason, keys)
                self._proceed(worker, now)
            case "heartbeat":
                worker.echo_ns = frame.heartbeat.sent_at_ns
                worker.takes_no_more |= frame.heartbeat.takes_no_more
                worker.stream.heard_of(frame.heartbeat.last_sequence)
                self._proceed(worker, now)
            case "goodbye":
                self._goodbye(worker, frame.goodbye, now)

    def _item(self, worker: Worker, frame: WorkerFrame, payload: bytes, now: float) -> None:
        stream = worker.stream
        fate = stream.take(frame.item, payload)
        if fate is Fate.FLOOD:
            items, size = stream.granted_sequence, stream.granted_bytes
            message = f"item {frame.item.sequence}: credit goes to item {items}, and to {size} bytes in all"
            raise RefusedError(RefusalReason.REFUSAL_REASON_PROTOCOL, message)
        if fate in (Fate.REFUSED, Fate.DAMAGED, Fate.DIVERGENT):
            self._tell(worker, frame.item.sequence, fate, payload)
        self._proceed(worker, now)

    def _tell(self, worker: Worker, sequence: int, fate: Fate, payload: bytes) -> None:
        error = worker.stream.refusal if fate is Fate.REFUSED else None
        if error is not None:
            self.refused += 1
            self._dead_letters.keep(payload, error, worker.stream.name, sequence)
        reason = {"reason": str(error)} if error is not None else {}
        self._repeated_log.begin(
            (worker.stream.name, fate), _log.warning, f"item {fate}", sequence=sequence, **reason, **_names(worker)
        )

    # The handshake.

    def _hello(self, peer: bytes, epoch: int, hello: Hello, now: float) -> None:
        identity = self._peers.identity(peer)
        check_hello(hello, self._settings.limits, identity)
        if self.is_draining:
            raise RefusedError(RefusalReason.REFUSAL_REASON_TOO_MANY_WORKERS, "the processor is closing")
        before = self._by_peer.get(peer)
        if before is not None and before.stream.worker_id != hello.worker_id:
            raise RefusedError(RefusalReason.REFUSAL_REASON_PROTOCOL, "hello.worker_id: one worker a connection")
        known = self.by_id.get(hello.worker_id)
        if known is not None:
            known = self._same_life(known, peer, epoch, hello, now)
        if known is None:
            self._check_fence(hello.worker_id, epoch, now)
            known = self._new_worker(hello, epoch, identity, now)
        elif hello.next_sequence < known.stream.expected:
            message = (
                f"hello.next_sequence: at least {known.stream.expected}, which is expected, got {hello.next_sequence}"
            )
            raise RefusedError(RefusalReason.REFUSAL_REASON_PROTOCOL, message)
        self._connect(known, peer, hello, now)

    def _same_life(self, known: Worker, peer: bytes, epoch: int, hello: Hello, now: float) -> Worker | None:
        """Return the known worker if it is the one that says hello, or None where another life may take its place."""
        name = known.stream.worker_id
        if epoch == known.stream.epoch:
            is_same_key = known.identity.name == self._peers.identity(peer).name
            is_same = is_same_key and hmac.compare_digest(known.proof, hello.proof)
            if not is_same or (not known.proof and known.peer != peer and self._is_alive(known, now)):
                message = f"worker {name}: epoch {epoch} of it is another connection's"
                raise RefusedError(RefusalReason.REFUSAL_REASON_WORKER_ID_TAKEN, message)
            return known
        self._check_epoch(name, epoch, known.stream.epoch)
        if self._is_alive(known, now):
            message = f"worker {name}: epoch {known.stream.epoch} of it is alive"
            raise RefusedError(RefusalReason.REFUSAL_REASON_WORKER_ID_TAKEN, message)
        self._lose(known, "a new life of it said hello")
        return None

    def _is_alive(self, worker: Worker, now: float) -> bool:
        """Tell whether a worker is there: it was heard in time, and its connection takes messages."""
        is_reachable = worker.peer is not None and self._heartbeat(worker, now) is not Outcome.GONE
        return is_reachable and now - worker.last_heard <= self._timeout

    def _check_fence(self, worker_id: str, epoch: int, now: float) -> None:
        """Refuse an older life for a while after a younger one has gone; never for good, however large its epoch."""
        latest, until = self._fenced.get(worker_id, (0, now))
        if now < until:
            self._check_epoch(worker_id, epoch, latest)
        self._fenced.pop(worker_id, None)

    def _check_epoch(self, worker_id: str, epoch: int, latest: int) -> None:
        if epoch < latest:
            message = f"epoch {epoch} of worker {worker_id}: a younger life was here, at least {latest} may come now"
            raise RefusedError(RefusalReason.REFUSAL_REASON_EPOCH_OUTDATED, message)

    def _new_worker(self, hello: Hello, epoch: int, identity: Identity, now: float) -> Worker:
        if len(self.by_id) >= self._settings.processor.max_workers:
            message = f"workers: at most {self._settings.processor.max_workers}"
            raise RefusedError(RefusalReason.REFUSAL_REASON_TOO_MANY_WORKERS, message)
        stream = Stream(hello, epoch, self._settings.limits, self._settings.processor)
        stream.counts = self.departed.pop(hello.worker_id, stream.counts)
        source = Source(next(self._streams), stream.name, hello.first_sequence > 1, takes_over(hello))
        assembler = Assembler(hello.worker_id, epoch, self._settings.processor)
        worker = Worker(
            stream, assembler, source, None, now, identity, hello.proof, now, acknowledged=hello.first_sequence - 1
        )
        self.by_id[hello.worker_id] = worker
        self.by_stream[source.stream] = worker
        return worker

    def _connect(self, worker: Worker, peer: bytes, hello: Hello, now: float) -> None:
        if worker.peer is not None:
            self._by_peer.pop(worker.peer, None)
        worker.peer = peer
        worker.last_heard = now
        worker.next_heartbeat = now + self._interval
        self._by_peer[peer] = worker
        self._unknown_peers.forget(peer)
        self._peers.admit(peer)
        stream = worker.stream
        stream.open_connection()
        if hello.first_sequence > stream.expected:
            reason = GapReason.GAP_REASON_RETENTION
            stream.declare_lost(stream.expected, hello.first_sequence - 1, reason, frozenset())
        welcome = Welcome(
            processor_id=self._settings.processor.id,
            schema_minor=MINOR,
            resume_from=stream.expected,
            credit=self._credit(worker),
            heartbeat_interval_ms=self._settings.bus.heartbeat_interval_ms,
            heartbeat_timeout_ms=self._settings.bus.heartbeat_timeout_ms,
        )
        self._send(worker, ProcessorFrame(welcome=welcome))
        registry, owners = self._intake.registry, hello.request_owners or repeat(NO_OWNER)
        worker.source.owners.clear()
        worker.source.owners.update(zip(hello.request_keys, owners, strict=False))
        # After the welcome: before that, a worker hears of no request that it is to end. Those that are not known here
        # are answered when a client resumes them: a hello may make up as many as it likes.
        for key in filter(registry.table.knows, hello.request_keys):
            registry.answer(key, worker.source)
        worker.reconcile = (hello.next_sequence - 1, frozenset(hello.request_keys))
        _log.info("worker connected", resume_from=stream.expected, **_names(worker))
        self._repeated_log.end(worker.stream.worker_id)
        self._intake.on_stream(worker)
        self._proceed(worker, now)

    def _stranger(self, peer: bytes, now: float) -> None:
        """Tell a peer that nobody knows to say hello: it was connected to an earlier life of this processor."""
        if self._unknown_peers.is_to_be_told(peer, now):
            refusal = Refusal(reason=RefusalReason.REFUSAL_REASON_HELLO_FIRST, message="say hello first")
            self._peers.send(peer, [write_frame(ProcessorFrame(refusal=refusal))])

    def _refuse(self, peer: bytes, worker: Worker | None, refused: RefusedError) -> None:
        self.refused += 1
        self.refusals[refused.name] += 1
        self._tell_refused(peer, refused)
        if worker is not None and worker.peer == peer:
            self._disconnect(worker)
        self._repeated_log.begin(
            ("refused", str(refused)), _log.warning, "worker refused", reason=str(refused), **_names(worker)
        )

    def _tell_refused(self, peer: bytes, refused: RefusedError) -> None:
        refusal = Refusal(reason=refused.reason, message=str(refused)[:1000])
        self._peers.send(peer, [write_frame(ProcessorFrame(refusal=refusal))])

    def _disconnect(self, worker: Worker) -> None:
        if worker.peer is not None:
            self._by_peer.pop(worker.peer, None)
            worker.peer = None

    def _goodbye(self, worker: Worker, goodbye: Goodbye, now: float) -> None:
        if goodbye.reason == GoodbyeReason.GOODBYE_REASON_RESTARTING:
            self._disconnect(worker)  # its retention stays good until the heartbeat's time is over
            return
        self._lose(worker, goodbye.message or "it stopped")
        self._fence(worker, worker.stream.epoch + 1, now)

    def _lose(self, worker: Worker, why: str) -> None:
        """Forget a worker: nothing more comes from it, and its requests end."""
        self._intake.close(worker)
        self._disconnect(worker)
        self.by_id.pop(worker.stream.worker_id, None)
        self.by_stream.pop(worker.source.stream, None)
        ended = self._intake.registry.end_those_of(worker.source.stream, worker.stream.worker_id, why)
        self.lost += 1
        self._keep_counts(worker)
        log = _log.warning if ended else _log.info
        log("worker gone", reason=why, requests_ended=ended, **_names(worker))

    def _keep_counts(self, worker: Worker) -> None:
        counts = worker.stream.counts
        counts.missing_drafts += worker.assembler.drafts_missing
        self.departed[worker.stream.worker_id] = counts
        if len(self.departed) > self._settings.processor.max_workers:
            self.departed.popitem(last=False)

    # What goes out.

    def _proceed(self, worker: Worker, now: float) -> None:
        """Hand on what is in order, and tell the worker what that means for it."""
        self._intake.proceed(worker, now)
        missing = worker.stream.missing(now)
        if missing is not None:
            first, last = missing
            replay = ReplayRequest(first_sequence=first, last_sequence=last)
            self._send(worker, ProcessorFrame(replay=replay))
            self._repeated_log.begin(
                (worker.stream.name, "replay"),
                _log.warning,
                "items asked for again",
                first=first,
                last=last,
                **_names(worker),
            )
        if worker.stream.wants_handshake:
            worker.stream.wants_handshake = False
            self._intake.proceed(worker, now)
            refusal = Refusal(reason=RefusalReason.REFUSAL_REASON_HELLO_FIRST, message="count credit anew")
            self._send(worker, ProcessorFrame(refusal=refusal))
        self.acknowledge(worker)
        if not self._intake.is_throttled(worker) and worker.stream.grant():
            self._send(worker, ProcessorFrame(credit=self._credit(worker)))

    def acknowledge(self, worker: Worker, *, at_once: bool = False) -> None:
        """Let the worker forget what has arrived; now and then, as each time costs a message."""
        acks = worker.stream.acks
        acks.advance()
        behind = acks.acknowledged - worker.acknowledged
        if behind and (at_once or behind >= self._settings.processor.credit_items // 8):
            worker.acknowledged = acks.acknowledged
            self._send(worker, ProcessorFrame(ack=Ack(through_sequence=acks.acknowledged)))

    def generate(self, worker: Worker, generate: Generate) -> bool:
        """Hand a request to a worker; False if it cannot be told just now."""
        return self._send(worker, ProcessorFrame(generate=generate)) is Outcome.SENT

    def abort(self, stream: int, key: int) -> None:
        """Tell a worker to end a request."""
        worker = self.by_stream.get(stream)
        if worker is not None:
            self._send(worker, ProcessorFrame(abort=Abort(request_key=key)))

    def tick(self, now: float) -> None:
        """Do what time alone demands: heartbeats, lost workers, late steps, late replays, acknowledgements."""
        for worker in list(self.by_id.values()):
            try:
                self._look_at(worker, now)
            except Exception:  # noqa: BLE001 - a defect of ours must not keep the others from their turn
                self.failed_ticks += 1
                self._repeated_log.begin("defect", _log.exception, "tick failed", **_names(worker))
                self._disconnect(worker)
        self._intake.registry.check_buffers(max((len(worker.stream.acks) for worker in self.by_id.values()), default=0))
        self._repeated_log.expire()

    def _look_at(self, worker: Worker, now: float) -> None:
        if now - worker.last_heard > self._timeout:
            self._lose(worker, f"silent for {self._settings.bus.heartbeat_timeout_ms} ms")
            self._fence(worker, worker.stream.epoch, now)
            return
        self._mind_silence(worker, now)
        self._proceed(worker, now)
        self.acknowledge(worker, at_once=True)
        if now >= worker.next_heartbeat:
            self._heartbeat(worker, now)
            # Both are totals: where the last of them was lost, nothing else would ever move the worker on.
            self._send(worker, ProcessorFrame(ack=Ack(through_sequence=worker.acknowledged)))
            self._send(worker, ProcessorFrame(credit=self._credit(worker)))

    def _fence(self, worker: Worker, oldest: int, now: float) -> None:
        """Remember for a while which is the oldest life of a worker that may come now."""
        self._fenced[worker.stream.worker_id] = oldest, now + self._timeout
        if len(self._fenced) > _MOST_EPOCHS:
            self._fenced.popitem(last=False)

    def _mind_silence(self, worker: Worker, now: float) -> None:
        """Count no time against a worker's steps in which it could not send: its link stalls, or we give no credit."""
        if now - worker.last_heard > _SILENCE * self._interval or self._intake.is_throttled(worker):
            worker.assembler.renew(now)

    def extend_deadlines(self, seconds: float, now: float) -> None:
        """Do not count some seconds as the workers' silence, nor against their steps."""
        for worker in self.by_id.values():
            worker.assembler.renew(now)
            worker.last_heard = min(now, worker.last_heard + seconds)

    def close(self, reason: GoodbyeReason, message: str) -> None:
        """Say goodbye to every worker."""
        for worker in self.by_id.values():
            self.acknowledge(worker, at_once=True)
            goodbye = Goodbye(reason=reason, message=message, last_sequence=worker.stream.expected - 1)
            self._send(worker, ProcessorFrame(goodbye=goodbye))
        self._repeated_log.close()

    def _heartbeat(self, worker: Worker, now: float) -> Outcome:
        worker.next_heartbeat = now + self._interval
        beat = Heartbeat(
            sent_at_ns=max(1, int(now * _NS)), echo_ns=worker.echo_ns, last_sequence=worker.stream.expected - 1
        )
        return self._send(worker, ProcessorFrame(heartbeat=beat))

    def _credit(self, worker: Worker) -> Credit:
        return Credit(through_sequence=worker.stream.granted_sequence, bytes=worker.stream.granted_bytes)

    def _send(self, worker: Worker, frame: ProcessorFrame) -> Outcome:
        if worker.peer is None:
            return Outcome.GONE
        outcome = self._peers.send(worker.peer, [write_frame(frame)])
        if outcome is Outcome.FULL:
            # A worker that reads nothing: what it is to know is told again at its next hello.
            self._disconnect(worker)
        return outcome


def _names(worker: Worker | None) -> dict[str, object]:
    return {} if worker is None else {"stream": worker.stream.worker_id, "epoch": worker.stream.epoch}
