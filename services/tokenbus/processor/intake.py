"""Intake: from a worker's items, in order, to steps that are settled and handed out."""

import asyncio
from collections.abc import Callable
from functools import partial

from tokenbus.delivery import PendingAck, Step
from tokenbus.logs import logger
from tokenbus.processor.client_connections import ClientConnections
from tokenbus.processor.dispatch import Dispatch
from tokenbus.processor.refused_messages import RefusedMessages
from tokenbus.processor.requests import Request
from tokenbus.processor.stream import Arrived, Fate, Lost
from tokenbus.processor.workers import Worker
from tokenbus.settings import Settings
from tokenbus_contracts import ContractError, Limits, LogprobBatch, PromptScores, encode
from tokenbus_contracts.generated.request_pb2 import Admitted, ErrorCode, RequestEvent
from tokenbus_contracts.generated.stream_pb2 import GapReason, WorkerRole

_log = logger("processor")
_SHARE_WITH_CREDIT = 0.5
"""The share of the consumers' buffer above which their worker gets no more credit."""
_SHARE_AFTER_EVICTION = 0.75
_PATIENCE = 1.0
"""How long a client may hold a full stream back that holds little of it, in seconds; at most a heartbeat interval."""
_GAP = ErrorCode.ERROR_CODE_GAP
_REASONS = {
    GapReason.GAP_REASON_RETENTION: "the worker does not retain them",
    GapReason.GAP_REASON_REFUSED: "they were refused",
    GapReason.GAP_REASON_WORKER_LOST: "the worker is lost",
}


class Intake:
    """Takes items from the workers' streams, and settles their steps against the requests."""

    def __init__(
        self,
        settings: Settings,
        dispatch: Dispatch,
        clients: ClientConnections,
        refused_messages: RefusedMessages,
        now: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._dispatch = dispatch
        self._clients = clients
        self._refused_messages = refused_messages
        self._now = now
        # As long as clients that are alive may take to come back after a restart, what waits for them is not given up.
        self._grace = (settings.bus.reconnect_max_ms + settings.bus.heartbeat_interval_ms) / 1000
        self.registry = dispatch.registry
        self.step_queue: asyncio.Queue[Step | None] | None = None
        """The steps that `Processor.steps` has not taken yet, while there is such an iterator."""
        self.step_observers: list[Callable[[Step], object]] = []
        """Called with each step once its rows are handed out; add and remove at any time."""
        self.stream_observers: list[Callable[[Worker], object]] = []
        """Called with each worker that completed a handshake."""
        self.log_item: Callable[[Worker, Arrived, PendingAck], object] | None = None
        """Called with each item, in order, and its pending ack: what keeps the durable log."""
        self.steps = 0
        self.refused = 0

    def proceed(self, worker: Worker, now: float) -> None:
        """Hand on everything that is in order and has room, and every step that is ready."""
        stream = worker.stream
        worker.waits_for_room = False
        for entry in stream.in_order(partial(self._has_room, worker, set())):
            if worker.reconcile is not None and entry.sequence > worker.reconcile[0]:
                self._reconcile(worker)  # what follows is younger than the worker's handshake
            if isinstance(entry, Lost):
                self._lost(worker, entry)
            else:
                self._arrived(worker, entry, now)
        for step in worker.assembler.ready(now):
            self._step(worker, step, now)
        is_all_here = worker.reconcile is not None and stream.expected > worker.reconcile[0]
        if is_all_here and not worker.assembler.open_steps:  # a request's last row may wait for its step's draft
            self._reconcile(worker)
        self._evict_if_held_back(worker, now)

    def connected(self, worker: Worker) -> None:
        """Learn that a worker is there, or there again."""
        self._clients.commands.resend(worker)
        self._clients.watchers.show_stream(worker)
        self._dispatch.hand_out_waiting()
        for observe in self.stream_observers:
            observe(worker)

    def close(self, worker: Worker, why: str) -> None:
        """Hand out what is left of a stream that has ended; the caller then ends its requests with a reason."""
        now = self._now()
        self.proceed(worker, now)
        for step in worker.assembler.close():
            self._step(worker, step, now, is_last=True)
        self._clients.commands.lost(worker, why)
        self._dispatch.expect_workers(now)

    def is_throttled(self, worker: Worker) -> bool:
        """Tell whether a worker gets no more credit for now, because its items are not taken.

        A slow client alone does not do that while others at the same worker keep up: its frames pile up in its own
        queue, and at their bound its requests end. Only for one that holds little a worker waits, for a moment.
        """
        is_full = self.step_queue is not None and self.step_queue.qsize() >= self._settings.processor.step_queue
        if is_full or worker.waits_for_room:
            return True
        # Before it is too much: what is sent again comes in bursts, and a client that comes back then is not slow.
        oldest, share = worker.stream.acks.oldest, self._share_pending(worker)
        if oldest is None or share <= _SHARE_WITH_CREDIT or worker.assembler.keeps(oldest):
            return False
        if oldest.unlogged or share > 1:
            return True
        waits_here = oldest.count > len(oldest.holders)
        if waits_here and self._now() < worker.met_at + self._grace:
            return True
        return self.registry.all_lag(worker.source.stream)

    def _has_room(self, worker: Worker, brought: set[int], entry: Arrived | Lost) -> bool:
        """Tell whether an item may come; else it waits until clients have claimed what its worker's key brought before.

        `brought` has the unknown requests of the items before it. After a restart, workers that share a key bring more
        than one of them may, and their clients come at the same time.
        """
        if isinstance(entry, Arrived) and isinstance(entry.contents, LogprobBatch):
            brought |= self.registry.brought_by(entry.contents, worker.source)
        worker.waits_for_room = len(brought) > self.registry.table.room_for(worker.source.payer)
        return not worker.waits_for_room

    def _arrived(self, worker: Worker, entry: Arrived, now: float) -> None:
        self._clients.watchers.show_item(worker, entry)
        pending_ack = PendingAck()
        if isinstance(entry.contents, LogprobBatch):
            pending_ack = self._batch(worker, entry, entry.contents, now)
        else:
            if isinstance(entry.contents, RequestEvent):
                self._event(worker, entry.contents, pending_ack, now)
            pending_ack.release()
        pending_ack.arrived_at = now
        worker.stream.acks.add(entry.sequence, pending_ack, len(entry.payload))
        if self.log_item is not None:
            self.log_item(worker, entry, pending_ack)

    def _batch(self, worker: Worker, entry: Arrived, batch: LogprobBatch, now: float) -> PendingAck:
        try:
            fate, pending_ack = worker.assembler.add(batch, now)
        except ContractError as error:
            self.refused += 1
            self._refuse(worker, entry.sequence, entry.payload, error)
            if batch.header.step > worker.assembler.last_released:  # else its rows have had their tokens without it
                reason = f"item {entry.sequence} was refused: {error}"
                worker.assembler.lose(batch.row_count)
                self._fail(worker, _ids(batch), reason)
            return PendingAck(0)
        if fate is Fate.DUPLICATE:
            worker.stream.counts.duplicates += 1
        elif fate is Fate.DIVERGENT:
            worker.stream.counts.divergences += 1
            differs = ContractError("payload", "what came first for the same part of the step", "something else")
            self._refuse(worker, entry.sequence, entry.payload, differs)
        return pending_ack

    def _refuse(self, worker: Worker, sequence: int, payload: bytes, error: ContractError) -> None:
        names = {"stream": worker.stream.worker_id, "epoch": worker.stream.epoch}
        self._refused_messages.add("item refused", payload, error, names, sequence=sequence)

    def _event(self, worker: Worker, event: RequestEvent, pending_ack: PendingAck, now: float) -> None:
        match event.WhichOneof("event"):
            case "admitted":
                self._admitted(worker, event.admitted)
            case "prefilled":
                if (request := self._own(worker, event.prefilled.request_id)) is not None:
                    request.transfer_state = event.prefilled.transfer_state
            case "control_answer":
                self._clients.commands.answered(worker, event.control_answer)
            case "prompt_scores":
                self._scored(worker, event, pending_ack, now)
            case "error":
                request_id = event.error.request_id
                request = self.registry.failed_by(request_id, worker.source, now)
                # A worker that stops refuses what crossed its last heartbeat on the way.
                if (
                    request is not None
                    and event.error.code == ErrorCode.ERROR_CODE_OVERLOADED
                    and _can_be_given_back(request)
                ):
                    worker.takes_no_more = True
                    self._dispatch.give_back(request)
                elif request is not None:
                    self.registry.fail(request, event.error.code, event.error.message, tell_worker=False)

    def _admitted(self, worker: Worker, admitted: Admitted) -> None:
        if (request := self._own(worker, admitted.request_id)) is not None:
            request.generate, request.weight_version = None, admitted.weight_version
            request.can_go_on &= worker.stream.hello.continues_requests
            if worker.stream.hello.role == WorkerRole.WORKER_ROLE_DECODE:
                admitted.ClearField("cached_tokens")  # the prefill worker has counted them
            self.registry.admitted(request, admitted)

    def _scored(self, worker: Worker, event: RequestEvent, pending_ack: PendingAck, now: float) -> None:
        """Hand a request what the model says of some of its prompt's tokens; each chunk that comes again, too."""
        chunk = event.prompt_scores
        try:
            PromptScores.of(chunk)
        except ContractError as error:
            self.refused += 1
            self._refuse(worker, event.sequence, event.SerializeToString(), error)
            if (request := self._own(worker, chunk.request_id)) is not None:
                self.registry.fail(request, _GAP, f"scores of its prompt were refused: {error}")
            return
        if (request := self.registry.scored_by(chunk.request_id, worker.source, now)) is None:
            return
        if (consumer := self.registry.consumer_of(request)) is not None:
            consumer.scored(request, chunk, pending_ack)
        elif not request.is_claimed:
            pending_ack.keep()
            request.scores.append((chunk, pending_ack))

    def _own(self, worker: Worker, request_id: int) -> Request | None:
        table = self.registry.table
        request = table.get(request_id)
        return request if request and table.stream_of(request) == worker.source.stream else None

    def _step(self, worker: Worker, step: Step, now: float, *, is_last: bool = False) -> None:
        if (unpaired := worker.assembler.unpaired) is not None:
            worker.assembler.unpaired = None
            self.refused += 1
            draft, error = unpaired
            self._refuse(worker, step.sequence, encode(draft, Limits.schema()), error)
        whole = step.rows
        self.steps += 1
        if step.is_whole and whole.header.draft_follows and step.draft_rows is None:
            worker.stream.counts.missing_drafts += 1
        try:
            self.registry.router.route(step, worker.source, now)
        except Exception:  # noqa: BLE001 - a defect of ours: it ends what it touched, not the stream, nor the process
            stream = worker.stream
            _log.exception("step not handed out", step=step.number, stream=stream.worker_id, epoch=stream.epoch)
            reason = "the processor could not hand its tokens out"
            self._fail(worker, _ids(whole), reason, ErrorCode.ERROR_CODE_INTERNAL)
        worker.count(step)
        if not step.is_explained and not is_last:
            self._fail_others(worker, _ids(whole), f"step {step.number} never came whole")
        if self.step_queue is not None:
            step.pending_ack.keep()  # until its consumer asks for the next one
            self.step_queue.put_nowait(step)
        for observe in self.step_observers:
            observe(step)
        step.pending_ack.release()

    def _lost(self, worker: Worker, lost: Lost) -> None:
        worker.stream.acks.skip(lost.last_sequence)
        which = f"items {lost.sequence} to {lost.last_sequence} of {worker.stream.name}"
        reason = f"{which} are lost: {_REASONS.get(lost.reason, str(lost.reason))}"
        if lost.request_ids:
            worker.assembler.lose(len(lost.request_ids))
            self._fail(worker, lost.request_ids, reason)
        else:
            self._fail_others(worker, frozenset(), reason)

    def _fail(self, worker: Worker, ids: frozenset[int], reason: str, code: ErrorCode = _GAP) -> None:
        for request_id in ids:
            if (request := self._own(worker, request_id)) is not None:
                self.registry.fail(request, code, reason)

    def _fail_others(self, worker: Worker, spared: frozenset[int], reason: str) -> None:
        for request in self.registry.table.of_stream(worker.source.stream):
            if request.id not in spared:
                self.registry.fail(request, _GAP, reason)

    def _reconcile(self, worker: Worker) -> None:
        """End the requests that the worker should have and has not: it never got them, or lost them."""
        _, ids = worker.reconcile or (0, frozenset())
        worker.reconcile = None
        for request in self.registry.table.of_stream(worker.source.stream):
            if request.id in ids:
                request.generate = None  # it need not be sent again
            elif worker.assembler.has_last_row(request.id):
                continue  # it has had its last row, and that waits here
            elif request.sent_after == worker.hellos:
                continue  # its hello could not name it: sent again, one that has ended since would run twice
            elif request.generate is None:
                why = f"worker {worker.stream.worker_id} does not have it any more"
                self.registry.fail(request, ErrorCode.ERROR_CODE_WORKER_LOST, why, tell_worker=False)
            else:
                self._dispatch.resend(worker, request)

    # Backpressure.

    def _share_pending(self, worker: Worker) -> float:
        """Return how much of what may wait for consumers does, from 0 to 1; above 1 it is too much."""
        settings, acks = self._settings.processor, worker.stream.acks
        return max(len(acks) / settings.pending_items, acks.bytes / settings.pending_bytes)

    def _evict_if_held_back(self, worker: Worker, now: float) -> None:
        worker.stream.acks.advance()
        oldest, share = worker.stream.acks.oldest, self._share_pending(worker)
        if oldest is None or share <= _SHARE_WITH_CREDIT:
            worker.held_back = None
            return
        if worker.held_back is None or worker.held_back[0] is not oldest:
            worker.held_back = oldest, now
        if share > 1 or now - worker.held_back[1] > self._settings.bus.heartbeat_timeout_ms / 1000:
            self._evict_slowest(worker, now)

    def _evict_slowest(self, worker: Worker, now: float) -> None:
        """End the requests of those that hold the stream back, the furthest behind first, until enough is free.

        A client that holds little of it, and not for long, is only behind for a moment: the worker waits for it.
        """
        acks = worker.stream.acks
        patience = min(_PATIENCE, self._settings.bus.heartbeat_interval_ms / 1000)
        while (oldest := acks.oldest) is not None and not (worker.assembler.keeps(oldest) or oldest.unlogged):
            has_remote_holders, is_pending_here = bool(oldest.holders), oldest.count > len(oldest.holders)
            through = acks.middle
            self._clients.evict(oldest, even_little=now - oldest.arrived_at > patience)
            if is_pending_here:
                self.registry.evict(oldest, through)
            is_free = acks.advance() or not acks.oldest
            if not (is_free and has_remote_holders) or self._share_pending(worker) <= _SHARE_AFTER_EVICTION:
                return


def _can_be_given_back(request: Request) -> bool:
    """Tell whether another worker may have a request: its own has not said that it took it, and it is to go on."""
    return request.generate is not None and request.aborted_at is None


def _ids(batch: LogprobBatch) -> frozenset[int]:
    return frozenset(batch.request_ids.tolist())
