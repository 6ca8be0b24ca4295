"""The processor's side of the stream protocol: handshakes, heartbeats, goodbyes, and lost workers."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import repeat

from tokenbus.bus import Identity, Role
from tokenbus.logs import logger
from tokenbus.processor.assembly import Assembler
from tokenbus.processor.connections import Connections, RefusedError, protocol_error
from tokenbus.processor.intake import Intake
from tokenbus.processor.refused_messages import RefusedMessages
from tokenbus.processor.requests import NO_OWNER, Source
from tokenbus.processor.stream import Stream
from tokenbus.processor.workers import Worker, Workers
from tokenbus.settings import Settings
from tokenbus_contracts import ContractError, Rule
from tokenbus_contracts.frames import read_frame
from tokenbus_contracts.generated.stream_pb2 import (
    Ack,
    GapReason,
    Goodbye,
    GoodbyeReason,
    Hello,
    ProcessorFrame,
    RefusalReason,
    StreamLimits,
    Welcome,
    WorkerFrame,
)

_log = logger("processor")
_LIMITS = [field.name for field in StreamLimits.DESCRIPTOR.fields]
_MOST_EPOCHS = 1024
_GRACE_SECONDS = 0.5
"""Time for a worker to reconnect after its connection closed, for example because a new publisher takes over."""
_SILENCE = 1.5
"""Number of heartbeat intervals above which silence is not just jitter."""
_MOST_SEQUENCE = 2**61
"""Half of the schema's bound on sequences, so that credit beyond a worker's last sequence stays below the bound."""


class WorkerConnections(Connections[Worker]):
    """Handles the frames of workers, and passes their items to the intake."""

    def __init__(self, settings: Settings, workers: Workers, intake: Intake, refused_messages: RefusedMessages) -> None:
        super().__init__("worker", WorkerFrame, workers, workers.by_id, settings, refused_messages)
        self._workers = workers
        self._intake = intake
        self._registry = intake.registry
        self._fenced: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """For each departed worker, the minimum epoch with which it may return, and when this limit expires."""

    def _handle(self, peer: bytes, known: Worker | None, parts: list[bytes], now: float) -> None:
        if not parts:
            raise ContractError("message", "one part, and the payload of an item", 0, rule=Rule.LENGTH)
        frame = read_frame(WorkerFrame, parts[0])
        body = frame.WhichOneof("body")
        if body == "hello":
            self._hello(peer, frame.epoch, frame.hello, now)
        elif known is None:
            self._ask_for_handshake(peer, now)
        elif frame.epoch != known.stream.epoch:
            raise ContractError("epoch", f"{known.stream.epoch}, as in its hello", frame.epoch)
        elif body is not None:
            self._excuse_silence(known, now)
            known.last_heard = now
            # An item may be older than the engine's last progress.
            # In that case, the next heartbeat tells how long the engine has stalled.
            known.stalled = frame.heartbeat.stalled_ms / 1000
            known.is_stalled = known.stalled > self._timeout
            self._frame(known, frame, body, parts, now)

    def _frame(self, worker: Worker, frame: WorkerFrame, body: str, parts: list[bytes], now: float) -> None:
        expected = 2 if body == "item" else 1
        if len(parts) != expected:
            raise ContractError("message", f"{expected} parts", len(parts), rule=Rule.LENGTH)
        match body:
            case "item":
                self._intake.process(worker, now, frame.item, parts[1])
            case "gap":
                first, last = frame.gap.first_sequence, frame.gap.last_sequence
                if last < first:
                    raise ContractError("gap.last_sequence", first, last, rule=Rule.MIN)
                if last > _MOST_SEQUENCE:
                    raise ContractError("gap.last_sequence", _MOST_SEQUENCE, last, rule=Rule.MAX)
                worker.stream.declare_lost(first, last, frame.gap.reason, frozenset(frame.gap.request_ids))
                self._intake.process(worker, now)
            case "heartbeat":
                worker.echo_ns = frame.heartbeat.sent_at_ns
                worker.is_draining |= frame.heartbeat.takes_no_more
                is_known = frame.heartbeat.HasField("kv_cache_permille")
                worker.kv_cache_permille = frame.heartbeat.kv_cache_permille if is_known else None
                worker.stream.heard_of(frame.heartbeat.last_sequence)
                self._intake.process(worker, now)
            case "goodbye":
                self._goodbye(worker, frame.goodbye, now)

    def _hello(self, peer: bytes, epoch: int, hello: Hello, now: float) -> None:
        identity = self._workers.listener.identity(peer)
        _check_hello(hello, self._settings, identity)
        if self.is_draining and hello.worker_id not in self._workers.by_id:
            raise RefusedError(RefusalReason.REFUSAL_REASON_TOO_MANY_WORKERS, "the processor is closing")
        before = self._workers.at(peer)
        if before is not None and before.stream.worker_id != hello.worker_id:
            raise protocol_error("hello.worker_id: one worker for each connection")
        known = self._workers.by_id.get(hello.worker_id)
        if known is not None:
            known = self._same_or_older_life(known, peer, epoch, hello, now)
        if known is None:
            self._check_fence(hello.worker_id, epoch, now)
            known = self._new_worker(hello, epoch, identity, now)
        elif hello.next_sequence < known.stream.expected:
            expected = known.stream.expected
            raise protocol_error(f"hello.next_sequence: at least {expected}, the next one, got {hello.next_sequence}")
        self._connect(known, peer, now)
        known.gone_since, known.is_stalled = None, False
        self._greet(known, hello, now)

    def _same_or_older_life(self, known: Worker, peer: bytes, epoch: int, hello: Hello, now: float) -> Worker | None:
        """Return the known worker if the hello comes from it, or None after a newer incarnation has replaced it."""
        name = known.stream.worker_id
        is_same_epoch = epoch == known.stream.epoch
        is_same_key = known.identity.name == self._workers.listener.identity(peer).name
        if is_same_epoch and is_same_key and self._is_same_life(known, peer, hello.proof, now):
            return known
        self._check_epoch(name, epoch, known.stream.epoch)
        if is_same_epoch or self._is_alive(known, now):
            message = f"worker {name}: another process has this id; give one of the two another worker.id (--id)"
            raise RefusedError(RefusalReason.REFUSAL_REASON_WORKER_ID_TAKEN, message)
        self._lose(known, "a new life of it said hello")
        return None

    def _check_fence(self, worker_id: str, epoch: int, now: float) -> None:
        """Refuse incarnations older than a departed one for a limited time, so that no epoch blocks an id forever."""
        latest, until = self._fenced.get(worker_id, (0, now))
        if now < until:
            self._check_epoch(worker_id, epoch, latest)
        self._fenced.pop(worker_id, None)

    def _check_epoch(self, worker_id: str, epoch: int, latest: int) -> None:
        if epoch < latest:
            message = (
                f"epoch {epoch} of worker {worker_id}: a newer life was here, so the epoch must be "
                f"at least {latest} for now"
            )
            raise RefusedError(RefusalReason.REFUSAL_REASON_EPOCH_OUTDATED, message)

    def _new_worker(self, hello: Hello, epoch: int, identity: Identity, now: float) -> Worker:
        if len(self._workers.by_id) >= self._settings.processor.max_workers:
            message = f"workers: at most {self._settings.processor.max_workers}"
            raise RefusedError(RefusalReason.REFUSAL_REASON_TOO_MANY_WORKERS, message)
        stream = Stream(hello, epoch, self._settings.limits, self._settings.processor)
        stream.counts = self._workers.departed.pop(hello.worker_id, stream.counts)
        worker = Worker(
            name=stream.name,
            proof=hello.proof,
            log_fields={"stream": hello.worker_id, "epoch": epoch},
            last_heard=now,
            stream=stream,
            assembler=Assembler(hello.worker_id, epoch, self._settings.processor),
            source=Source(self._workers.streams, stream.name, hello.first_sequence > 1, key=identity.name),
            identity=identity,
            met_at=now,
            acknowledged=hello.first_sequence - 1,
        )
        self._workers.add(worker)
        return worker

    def _greet(self, worker: Worker, hello: Hello, now: float) -> None:
        stream = worker.stream
        stream.open_connection()
        if hello.first_sequence > stream.expected:
            reason = GapReason.GAP_REASON_RETENTION
            stream.declare_lost(stream.expected, hello.first_sequence - 1, reason, frozenset())
        welcome = Welcome(resume_from=stream.expected, credit=stream.credit, **self._welcome())
        self._workers.send(worker, ProcessorFrame(welcome=welcome))
        registry, owners = self._registry, hello.request_owners or repeat(NO_OWNER)
        worker.source.owners.clear()
        worker.source.owners.update(zip(hello.request_ids, owners, strict=False))
        # Aborts are sent after the welcome, because a worker ignores earlier aborts.
        # Unknown requests in the hello are opened only when a client resumes them, because a worker may invent many.
        worker.reconcile = hello.next_sequence - 1
        for request_id, owner in worker.source.owners.items():
            registry.table.forget_end_at_other_client(request_id, owner)
        for request_id in filter(registry.table.knows, hello.request_ids):
            registry.on_worker_has(request_id, worker.source)
        worker.hellos += 1
        self._workers.arrivals += 1
        _log.info("worker connected", resume_from=stream.expected, **worker.log_fields)
        self._intake.connected(worker)
        self._intake.process(worker, now)

    def _refuse(self, peer: bytes, known: Worker | None, refused: RefusedError) -> None:
        super()._refuse(peer, known, refused)
        if known is not None and known.peer == peer:
            self._workers.disconnect(known)

    def _goodbye(self, worker: Worker, goodbye: Goodbye, now: float) -> None:
        if goodbye.reason == GoodbyeReason.GOODBYE_REASON_RESTARTING:
            self._workers.disconnect(worker)  # the worker is lost only if it does not return within the timeout
            return
        self._lose(worker, goodbye.message or "it stopped")
        self._fence(worker, worker.stream.epoch + 1, now)

    def send_away(self, workers: Iterable[Worker], why: str) -> None:
        """Say goodbye to idle workers with several processors, so that they move to another processor."""
        for worker in list(workers):
            if worker.stream.hello.processors > 1 and not self._registry.table.load_of(worker.source.stream):
                self._say_goodbye(worker, GoodbyeReason.GOODBYE_REASON_RESTARTING, why)
                self._lose(worker, why)

    def _lose(self, worker: Worker, why: str) -> None:
        self._intake.close(worker, why)
        self._workers.disconnect(worker)
        self._workers.remove(worker)
        ended = self._registry.end_all_of(worker.source.stream, worker.stream.worker_id, why)
        log = _log.warning if ended else _log.info
        log("worker gone", reason=why, requests_ended=ended, **worker.log_fields)

    def _check(self, known: Worker, now: float) -> None:
        is_gone = known.peer is not None and not self._workers.listener.is_connected(known.peer)
        if not is_gone:
            known.gone_since = None
        elif known.gone_since is None:
            known.gone_since = now
        known.is_stalled = is_gone or now - known.last_heard + known.stalled > self._timeout
        if known.is_stalled and (why := self._why_lost(known, now)):
            self._workers.cut_off(known)
            self._lose(known, why)
            self._fence(known, known.stream.epoch, now)
            return
        if known.is_stalled and not is_gone:
            self._warn_once((known.name, "stalled"), "worker stalled", known)
        self._excuse_silence(known, now)
        self._intake.process(known, now)
        self._workers.acknowledge(known, at_once=True)
        if now >= known.next_heartbeat:
            self._send_heartbeat(known, now)
            # The last ack and the last credit are sent again, because a worker would wait forever for a lost one.
            # Acks and credit are totals, so repetition is harmless.
            self._workers.send(known, ProcessorFrame(ack=Ack(through_sequence=known.acknowledged)))
            self._workers.send(known, ProcessorFrame(credit=known.stream.credit))

    def _why_lost(self, worker: Worker, now: float) -> str:
        """Return the reason why a stalled worker is lost, or an empty string while it may be in a long step.

        Silence alone proves nothing, because a worker on a busy machine may not be scheduled for seconds.
        """
        grace = min(_GRACE_SECONDS, self._timeout)
        if worker.gone_since is not None and now - worker.gone_since >= grace:
            return f"its connection closed, and it did not come back within {round(1000 * grace)} ms"
        silent = now - worker.last_heard
        has_requests = self._registry.table.load_of(worker.source.stream)
        patience = self._timeout + worker.stream.hello.longest_step_ms / 1000
        if silent > self._timeout and (worker.peer is None or not has_requests):
            return f"silent for {self._settings.bus.heartbeat_timeout_ms} ms"
        if silent + worker.stalled > patience:
            shown = "its engine made no progress" if worker.stalled else "silent"
            return f"{shown} for {round(1000 * patience)} ms"
        return ""

    def _fence(self, worker: Worker, oldest: int, now: float) -> None:
        self._fenced[worker.stream.worker_id] = oldest, now + self._timeout
        if len(self._fenced) > _MOST_EPOCHS:
            self._fenced.popitem(last=False)

    def _excuse_silence(self, worker: Worker, now: float) -> None:
        """Restart the timeout of a worker's open steps if the worker could not send for a while."""
        if now - worker.last_heard > _SILENCE * self._interval or self._intake.is_throttled(worker):
            worker.assembler.renew(now)

    def extend_deadlines(self, seconds: float, now: float) -> None:
        super().extend_deadlines(seconds, now)
        for worker in self._workers.by_id.values():
            worker.assembler.renew(now)
            if worker.gone_since is not None:
                worker.gone_since = min(now, worker.gone_since + seconds)
            if worker.held_back is not None:
                oldest, since = worker.held_back
                worker.held_back = oldest, min(now, since + seconds)

    def _flush(self, known: Worker) -> None:
        self._workers.acknowledge(known, at_once=True)

    def _last_sequence(self, known: Worker) -> int:
        return known.stream.in_order_through


def _check_hello(hello: Hello, settings: Settings, identity: Identity) -> None:
    if not identity.may(Role.WORKER, hello.worker_id):
        message = f"key {identity.name} may not be worker {hello.worker_id}"
        raise RefusedError(RefusalReason.REFUSAL_REASON_NOT_AUTHORIZED, message)
    for name, most, found in (
        *((f"limits.{name}", getattr(settings.limits, name), getattr(hello.limits, name)) for name in _LIMITS),
        ("longest_step_ms", settings.processor.longest_step_ms, hello.longest_step_ms),
    ):
        if found > most:
            error = ContractError(f"hello.{name}", most, found, rule=Rule.MAX)
            raise RefusedError(RefusalReason.REFUSAL_REASON_LIMITS, str(error))
    first, following = hello.first_sequence, hello.next_sequence
    if following < first:
        raise protocol_error(ContractError("hello.next_sequence", first, following, rule=Rule.MIN))
    if following > _MOST_SEQUENCE:
        raise protocol_error(ContractError("hello.next_sequence", _MOST_SEQUENCE, following, rule=Rule.MAX))
    if hello.request_owners and len(hello.request_owners) != len(hello.request_ids):
        limit = f"{len(hello.request_ids)}, one for each of request_ids"
        raise protocol_error(ContractError("hello.request_owners", limit, len(hello.request_owners), rule=Rule.LENGTH))
