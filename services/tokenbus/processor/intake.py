"""Intake: processes the items of worker streams, from bytes to frames for clients."""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from tokenbus.delivery import PendingAck, Step
from tokenbus.logs import logger
from tokenbus.processor.client_connections import ClientConnections
from tokenbus.processor.connections import protocol_error
from tokenbus.processor.dispatch import Dispatch
from tokenbus.processor.refused_messages import RefusedMessages
from tokenbus.processor.requests import Request
from tokenbus.processor.router import Router
from tokenbus.processor.stream import ItemOutcome, LostItems, ReceivedItem
from tokenbus.processor.workers import Worker
from tokenbus.recordings.items import StreamItem
from tokenbus.settings import Settings
from tokenbus_contracts import ContractError, Limits, LogprobBatch, PromptScores, encode
from tokenbus_contracts.generated.request_pb2 import Admitted, ErrorCode, RequestEvent
from tokenbus_contracts.generated.stream_pb2 import (
    GapReason,
    Item,
    ProcessorFrame,
    Refusal,
    RefusalReason,
    ReplayRequest,
    WorkerRole,
)

_log = logger("processor")
_MAX_FILL_WITH_CREDIT = 0.5
"""Fill level of the consumers' buffer above which the worker gets no more credit."""
_FILL_AFTER_EVICTION = 0.75
_PATIENCE = 1.0
"""A client with few pending items may delay a full stream for this many seconds, but at most a heartbeat interval."""
_GAP = ErrorCode.ERROR_CODE_GAP
_REASONS = {
    GapReason.GAP_REASON_RETENTION: "the worker does not retain them",
    GapReason.GAP_REASON_REFUSED: "they were refused",
    GapReason.GAP_REASON_WORKER_LOST: "the worker is lost",
}


class Intake:
    """Turns the items of workers into steps, and delivers the rows of each step."""

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
        self._workers = dispatch.workers
        self._clients = clients
        self._refused_messages = refused_messages
        self._now = now
        # Live clients need up to this many seconds to reconnect after a restart, so unclaimed rows are kept meanwhile.
        self._grace = (settings.bus.reconnect_max_ms + settings.bus.heartbeat_interval_ms) / 1000
        self.registry = dispatch.registry
        self.router = Router(dispatch)
        self.step_queue: asyncio.Queue[Step | None] | None = None
        """Steps that wait for the consumer of `Processor.steps`, or None without such a consumer."""
        self.step_observers: list[Callable[[Step], object]] = []
        """Callbacks that receive each step after the step's rows are delivered."""
        self.stream_observers: list[Callable[[Worker], object]] = []
        """Callbacks that receive each worker after the worker's handshake."""
        self.log_item: Callable[[StreamItem, PendingAck], object] | None = None
        """Callback that writes each item to the durable log in order, or None without a log."""
        self.steps = 0
        self.refused_items = 0
        self.refused_parts = 0
        """Number of parts that contradict other parts of the same step."""
        clients.on_ack = self._answer_all

    def process(
        self, worker: Worker, now: float, item: Item | None = None, payload: bytes = b"", *, at_end: bool = False
    ) -> None:
        """Process an item of a worker's stream, from its bytes to the frames for clients.

        docs/architecture.md lists the same steps. Without an item, only waiting items are processed, because a gap, a
        heartbeat or a timeout may have unblocked them. With `at_end`, incomplete steps are delivered too. Raises
        RefusedError if the worker exceeds its credit.
        """
        # 1. Check the item's credit and checksum, then decode and validate its batch.
        if item is not None:
            self._receive(worker, item, payload)

        # 2. Restore the order of the stream: items wait until the worker has resent all missing earlier items.
        for entry in self._in_order(worker, now, at_end=at_end):
            if worker.reconcile is not None and entry.sequence > worker.reconcile:
                self._reconcile(worker)  # all items that the worker sent before its hello have been processed
            if isinstance(entry, LostItems):
                self._on_lost(worker, entry)
                continue
            # 3. Join the parts of a step, and pair its target batch with its draft batch.
            self._add_item(worker, entry, now)

        # 4. Release complete steps in the order of their numbers.
        for step in worker.assembler.ready(now, at_end=at_end):
            received = step.rows
            self._check_drafts(worker, step)
            try:
                # 5. Compare each row with the next position of its request, and drop duplicate rows.
                slots, parts = self.router.settle(step, worker.source, now)
                # 6. Put each client's rows into its send queue as one frame; unclaimed rows wait for a client.
                self.router.deliver(step, slots, parts)
                # 7. Close the requests that got their last row, and send prefilled requests to a decode worker.
                self.router.close_finished(step, worker.source)
            except Exception:  # noqa: BLE001 - a defect of the processor fails only the requests of this step
                stream = worker.stream
                _log.exception("step not handed out", step=step.number, stream=stream.worker_id, epoch=stream.epoch)
                reason = "the processor failed to deliver its tokens"
                self._fail(worker, _ids(received), reason, ErrorCode.ERROR_CODE_INTERNAL)
            if not step.is_explained and not at_end:
                self._fail_others(worker, _ids(received), f"step {step.number} never arrived completely")
            # 8. Pass the whole step to `Processor.steps()` and to the observers.
            self._publish(worker, step)

        # 9. Evict clients that hold the stream back, acknowledge items that no consumer needs, and grant credit.
        if not at_end:
            self._reconcile_if_caught_up(worker)
            self._evict_if_held_back(worker, now)
            self._answer(worker)

    def close(self, worker: Worker, why: str) -> None:
        """Deliver the remaining steps of an ended stream; the caller then fails the stream's requests."""
        now = self._now()
        self.process(worker, now, at_end=True)
        self._clients.commands.lost(worker, why)
        self._dispatch.expect_workers(now)

    def connected(self, worker: Worker) -> None:
        self._clients.commands.resend(worker)
        self._clients.watchers.show_stream(worker)
        self._dispatch.dispatch_waiting()
        for observe in self.stream_observers:
            observe(worker)

    def _receive(self, worker: Worker, item: Item, payload: bytes) -> None:
        stream = worker.stream
        outcome = stream.receive(item, payload)
        if outcome is ItemOutcome.FLOOD:
            granted, size = stream.credit.through_sequence, stream.credit.bytes
            message = f"item {item.sequence}: credit goes to item {granted}, and to {size} bytes in all"
            raise protocol_error(message)
        if outcome is ItemOutcome.REFUSED and stream.refusal is not None:
            self.refused_items += 1
            self._log_refused(worker, item.sequence, payload, stream.refusal)
        elif outcome in (ItemOutcome.DAMAGED, ItemOutcome.DIVERGENT):
            self._warn_once((worker.name, outcome), f"item {outcome}", worker, sequence=item.sequence)

    def _in_order(self, worker: Worker, now: float, *, at_end: bool) -> deque[ReceivedItem | LostItems]:
        """Return the next items in order, and request missing items from the worker again."""
        stream, has_room = worker.stream, partial(self._has_room, worker, set())
        worker.waits_for_room = False
        entries = stream.in_order(has_room)
        if not at_end and (missing := stream.missing(now)) is not None:
            first, last = missing
            replay = ReplayRequest(first_sequence=first, last_sequence=last)
            self._workers.send(worker, ProcessorFrame(replay=replay))
            self._warn_once((worker.name, "replay"), "items asked for again", worker, first=first, last=last)
        if stream.wants_handshake:  # the last replay request failed, so the missing items are declared lost
            entries += stream.in_order(has_room)
        return entries

    def _has_room(self, worker: Worker, unknown_ids: set[int], entry: ReceivedItem | LostItems) -> bool:
        """Return whether the table can hold the unclaimed requests of an item and of the items before it.

        Otherwise, the item waits until clients have claimed earlier requests of the worker's key. After a restart,
        workers with a shared key may report more requests than the limit of one key while clients still reconnect.
        """
        if isinstance(entry, ReceivedItem) and isinstance(entry.contents, LogprobBatch):
            unknown_ids |= self.registry.waiting_for_room(entry.contents, worker.source)
        if unknown_ids:
            worker.waits_for_room = len(unknown_ids) > self.registry.table.room_for(worker.source.payer)
        return not worker.waits_for_room

    def _add_item(self, worker: Worker, entry: ReceivedItem, now: float) -> None:
        self._clients.watchers.show_item(worker, entry)
        pending_ack = PendingAck()
        if isinstance(entry.contents, LogprobBatch):
            pending_ack = self._add_batch(worker, entry, entry.contents, now)
        else:
            if isinstance(entry.contents, RequestEvent):
                self._on_event(worker, entry.contents, pending_ack, now)
            pending_ack.release()
        pending_ack.arrived_at = now
        worker.stream.acks.add(entry.sequence, pending_ack, len(entry.payload))
        if self.log_item is not None:
            stream = worker.stream
            item = StreamItem(stream.hello, stream.epoch, entry.sequence, entry.kind, entry.payload)
            self.log_item(item, pending_ack)

    def _add_batch(self, worker: Worker, entry: ReceivedItem, batch: LogprobBatch, now: float) -> PendingAck:
        try:
            outcome, pending_ack = worker.assembler.add(batch, now)
        except ContractError as error:
            self.refused_parts += 1
            self._log_refused(worker, entry.sequence, entry.payload, error)
            if batch.header.step > worker.assembler.last_released:  # the step has not been released yet
                worker.assembler.count_lost(batch.row_count)
                self._fail(worker, _ids(batch), f"item {entry.sequence} was refused: {error}")
            return PendingAck(0)
        if outcome is ItemOutcome.DUPLICATE:
            worker.stream.counts.duplicates += 1
        elif outcome is ItemOutcome.DIVERGENT:
            worker.stream.counts.divergences += 1
            differs = ContractError("payload", "the first item for the same part of the step", "something else")
            self._log_refused(worker, entry.sequence, entry.payload, differs)
        return pending_ack

    def _on_lost(self, worker: Worker, lost: LostItems) -> None:
        worker.stream.acks.add(lost.last_sequence, PendingAck(0), 0)
        items = f"items {lost.sequence} to {lost.last_sequence} of {worker.stream.name}"
        reason = f"{items} are lost: {_REASONS.get(lost.reason, str(lost.reason))}"
        if lost.request_ids:
            worker.assembler.count_lost(len(lost.request_ids))
            self._fail(worker, lost.request_ids, reason)
        else:
            self._fail_others(worker, frozenset(), reason)

    def _log_refused(self, worker: Worker, sequence: int, payload: bytes, error: ContractError) -> None:
        self._refused_messages.add("item refused", payload, error, worker.log_fields, sequence=sequence)

    def _warn_once(self, key: tuple[str, str], event: str, worker: Worker, **values: object) -> None:
        self._refused_messages.repeated_log.begin(key, _log.warning, event, **values, **worker.log_fields)

    def _on_event(self, worker: Worker, event: RequestEvent, pending_ack: PendingAck, now: float) -> None:
        match event.WhichOneof("event"):
            case "admitted":
                self._on_admitted(worker, event.admitted)
            case "prefilled":
                if (request := self._request_of(worker, event.prefilled.request_id)) is not None:
                    request.transfer_state = event.prefilled.transfer_state
            case "control_answer":
                self._clients.commands.answered(worker, event.control_answer)
            case "prompt_scores":
                self._on_scores(worker, event, pending_ack, now)
            case "error":
                request = self.registry.failed_by(event.error.request_id, worker.source, now)
                if request is None:
                    return
                # A draining worker refuses requests that were sent before its last heartbeat was received.
                is_refused = event.error.code == ErrorCode.ERROR_CODE_OVERLOADED
                if is_refused and request.generate is not None and request.aborted_at is None:
                    worker.is_draining = True
                    self._dispatch.requeue(request)
                else:
                    self.registry.fail(request, event.error.code, event.error.message, tell_worker=False)

    def _on_admitted(self, worker: Worker, admitted: Admitted) -> None:
        if (request := self._request_of(worker, admitted.request_id)) is None:
            return
        request.generate, request.weight_version = None, admitted.weight_version
        request.is_continuable &= worker.stream.hello.continues_requests
        if worker.stream.hello.role == WorkerRole.WORKER_ROLE_DECODE:
            admitted.ClearField("cached_tokens")  # the prefill worker has already reported the cached tokens
        if (consumer := self.registry.consumer_of(request)) is not None:
            consumer.admitted(request, admitted)

    def _on_scores(self, worker: Worker, event: RequestEvent, pending_ack: PendingAck, now: float) -> None:
        """Deliver scores of prompt tokens; the client drops chunks that it already has."""
        chunk = event.prompt_scores
        try:
            PromptScores.of(chunk)
        except ContractError as error:
            self.refused_parts += 1
            self._log_refused(worker, event.sequence, event.SerializeToString(), error)
            self._fail(worker, frozenset({chunk.request_id}), f"scores of its prompt were refused: {error}")
            return
        if (request := self.registry.scored_by(chunk.request_id, worker.source, now)) is None:
            return
        if (consumer := self.registry.consumer_of(request)) is not None:
            consumer.scored(request, chunk, pending_ack)
        elif not request.is_claimed:
            pending_ack.keep()
            request.scores.append((chunk, pending_ack))

    def _request_of(self, worker: Worker, request_id: int) -> Request | None:
        table = self.registry.table
        request = table.get(request_id)
        return request if request and table.stream_of(request) == worker.source.stream else None

    def _fail(self, worker: Worker, ids: frozenset[int], reason: str, code: ErrorCode = _GAP) -> None:
        for request_id in ids:
            if (request := self._request_of(worker, request_id)) is not None:
                self.registry.fail(request, code, reason)

    def _fail_others(self, worker: Worker, spared: frozenset[int], reason: str) -> None:
        for request in self.registry.table.of_stream(worker.source.stream):
            if request.id not in spared:
                self.registry.fail(request, _GAP, reason)

    def _check_drafts(self, worker: Worker, step: Step) -> None:
        self.steps += 1
        step.pending_ack.ordinal = self.steps
        if (unpaired := worker.assembler.unpaired) is not None:
            worker.assembler.unpaired = None
            self.refused_parts += 1
            draft, error = unpaired
            self._log_refused(worker, step.sequence, encode(draft, Limits.schema()), error)
        if step.is_whole and step.rows.header.draft_follows and step.draft_rows is None:
            worker.stream.counts.missing_drafts += 1

    def _publish(self, worker: Worker, step: Step) -> None:
        worker.count(step)
        if self.step_queue is not None:
            step.pending_ack.keep()  # the ack is released when the consumer asks for the next step
            self.step_queue.put_nowait(step)
        for observe in self.step_observers:
            observe(step)
        step.pending_ack.release()

    def _reconcile_if_caught_up(self, worker: Worker) -> None:
        is_caught_up = worker.reconcile is not None and worker.stream.expected > worker.reconcile
        if is_caught_up and not worker.assembler.open_steps:  # the last row of a request may be in an open step
            self._reconcile(worker)

    def _reconcile(self, worker: Worker) -> None:
        """Fail or resend the requests that were sent to a worker but are missing from the worker's last hello."""
        worker.reconcile = None
        for request in self.registry.table.of_stream(worker.source.stream):
            if request.id in worker.source.owners:
                request.generate = None  # the worker has the request, so the message is not needed again
            elif worker.assembler.has_last_row(request.id):
                continue  # the request has ended at the worker, and its last row is in an open step
            elif request.sent_after == worker.hellos:
                continue  # the request was sent after the hello, so sending it again could run it twice
            elif request.generate is None:
                why = f"worker {worker.stream.worker_id} no longer has it"
                self.registry.fail(request, ErrorCode.ERROR_CODE_WORKER_LOST, why, tell_worker=False)
            else:
                self._dispatch.resend(worker, request)

    def _answer(self, worker: Worker) -> None:
        stream = worker.stream
        if stream.wants_handshake:
            stream.wants_handshake = False
            refusal = Refusal(reason=RefusalReason.REFUSAL_REASON_HELLO_FIRST, message="count credit anew")
            self._workers.send(worker, ProcessorFrame(refusal=refusal))
        self._workers.acknowledge(worker)
        if stream.is_credit_due and not self.is_throttled(worker):
            stream.grant()
            self._workers.send(worker, ProcessorFrame(credit=stream.credit))

    def _answer_all(self) -> None:
        """After a client's ack, send the acks and the credit that workers would otherwise get only at a heartbeat."""
        for worker in self._workers.by_id.values():
            self._answer(worker)

    def is_throttled(self, worker: Worker) -> bool:
        """Return whether a worker gets no credit for now, because consumers are behind.

        One slow client does not throttle a worker while other clients of the worker keep up. The slow client's frames
        collect in its send queue, and its requests fail when the queue is full.
        """
        is_full = self.step_queue is not None and self.step_queue.qsize() >= self._settings.processor.step_queue
        if is_full or worker.waits_for_room:
            return True
        oldest, fill = worker.stream.acks.oldest, self._fill_level(worker)
        if oldest is None or fill <= _MAX_FILL_WITH_CREDIT or worker.assembler.has_open(oldest):
            return False
        if oldest.unlogged or fill > 1:
            return True
        is_pending_here = oldest.count > len(oldest.holders)
        if is_pending_here and self._now() < worker.met_at + self._grace:
            return True  # replayed items arrive in bursts, while their clients may still be reconnecting
        return self.registry.all_lag(worker.source.stream)

    def _fill_level(self, worker: Worker) -> float:
        """Return the fill level of the consumers' buffer, from 0 to 1, or more if the buffer overflows."""
        settings, acks = self._settings.processor, worker.stream.acks
        return max(len(acks) / settings.pending_items, acks.bytes / settings.pending_bytes)

    def _evict_if_held_back(self, worker: Worker, now: float) -> None:
        worker.stream.acks.advance()
        oldest, fill = worker.stream.acks.oldest, self._fill_level(worker)
        if oldest is None or fill <= _MAX_FILL_WITH_CREDIT:
            worker.held_back = None
            return
        if worker.held_back is None or worker.held_back[0] is not oldest:
            worker.held_back = oldest, now
        if fill > 1 or now - worker.held_back[1] > self._settings.bus.heartbeat_timeout_ms / 1000:
            self._evict_slowest(worker, now)

    def _evict_slowest(self, worker: Worker, now: float) -> None:
        """Fail the requests of the consumers that are furthest behind, until the buffer has free space.

        A client with few pending items is evicted only if it has held the stream back for longer than `_PATIENCE`.
        """
        acks = worker.stream.acks
        patience = min(_PATIENCE, self._settings.bus.heartbeat_interval_ms / 1000)
        while (oldest := acks.oldest) is not None and not (worker.assembler.has_open(oldest) or oldest.unlogged):
            has_remote_holders, is_pending_here = bool(oldest.holders), oldest.count > len(oldest.holders)
            through = acks.middle
            self._clients.evict(oldest, even_small=now - oldest.arrived_at > patience)
            if is_pending_here:
                self.registry.evict(oldest, through)
            is_free = acks.advance() or not acks.oldest
            if not (is_free and has_remote_holders) or self._fill_level(worker) <= _FILL_AFTER_EVICTION:
                return


def _ids(batch: LogprobBatch) -> frozenset[int]:
    return frozenset(batch.request_ids.tolist())
