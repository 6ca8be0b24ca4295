"""RequestRegistry: opens and ends requests, and informs their workers and consumers."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from tokenbus.clock import Clock
from tokenbus.delivery import PendingAck
from tokenbus.delivery.errors import CODE_NAMES, NOT_TAKEN, RETRY_MS, code_name, request_error
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.processor.requests import (
    NO_OWNER,
    NO_STREAM,
    UNCLAIMED,
    UNROUTED,
    Deadline,
    Request,
    RequestTable,
    Source,
    State,
)
from tokenbus.processor.session import Session
from tokenbus.processor.workers import Workers
from tokenbus.settings import ProcessorSettings
from tokenbus_contracts import LogprobBatch
from tokenbus_contracts.generated.client_pb2 import Resume
from tokenbus_contracts.generated.request_pb2 import ErrorCode, Generate, RequestError

_log = logger("processor")
_MOST_DROPPED = 256
"""Maximum number of unclaimed requests dropped in one tick, because a worker may have invented thousands."""


@dataclass(slots=True)
class RequestCounts:
    """Counts of requests, by the way in which they began or ended."""

    opened: int = 0
    finished: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    unclaimed: int = 0
    refused_resumes: int = 0
    """Number of refused attempts to resume another client's request."""


class RequestRegistry:
    """All requests, and the consumers that receive the requests' rows."""

    def __init__(self, settings: ProcessorSettings, clock: Clock, workers: Workers) -> None:
        self._settings = settings
        self._clock = clock
        self._now = clock.now
        self._abort_timeout = settings.abort_timeout_ms / 1000
        self.workers = workers
        self.table = RequestTable(settings.max_requests, settings.ended_requests, settings.requests_per_peer)
        self.consumers: dict[int, Session] = {}
        """Sessions by route."""
        self.default_route = UNCLAIMED
        """Route of the requests that no client has claimed."""
        self.counts = RequestCounts()
        self._repeated_log = DeduplicatedLog()
        self.failed_ticks = 0

    def submit(self, generate: Generate, stream: int, route: int, owner: int) -> Request:
        """Open a client's request at a stream, or queue it if `stream` is NO_STREAM. The caller checks limits first."""
        deadline = self._deadline(generate.deadline_unix_ms, generate.deadline_ms)
        self.counts.opened += 1
        return self.table.submit(generate, stream, route, owner, deadline)

    def _deadline(self, unix_ms: int, at_most_ms: int = 0) -> Deadline:
        """Return the earliest of the processor's and the client's deadlines; a client's zero means no deadline."""
        ms = self._settings.request_timeout_ms
        if unix_ms:
            ms = min(ms, unix_ms - self._clock.unix_ms())
        if at_most_ms:
            ms = min(ms, at_most_ms)
        ms = max(0, ms)
        return Deadline(self._now() + ms / 1000, self._clock.unix_ms() + ms, ms)

    def make_room(self) -> None:
        """Drop the oldest unclaimed request, if any, so that the table can hold a client's request."""
        if (request := self.table.oldest_unclaimed()) is not None:
            self._drop_unclaimed(request)

    def refused(self, ids: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint32], source: Source) -> list[bool]:
        """For each unknown request, return whether missing tokens or a full table prevent opening the request."""
        may_open = self._may_open(ids, positions, source)
        room = self.table.room_for(source.payer)
        return [not each or number > room for each, number in zip(may_open, accumulate(may_open), strict=True)]

    def _may_open(self, ids: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint32], source: Source) -> list[bool]:
        if self.default_route == UNROUTED or source.is_resumed:
            return [True] * ids.size
        pairs = zip(ids.tolist(), positions.tolist(), strict=True)
        return [position == 0 or request_id in source.owners for request_id, position in pairs]

    def waiting_for_room(self, batch: LogprobBatch, source: Source) -> set[int]:
        """Return the unknown requests that a batch would open, or no ids if the payer has no other requests."""
        if self.default_route == UNROUTED or not self.table.charged_to(source.payer):
            return set()
        unknown = np.flatnonzero(self.table.slots_of(batch.request_ids) < 0)
        ids, positions = batch.request_ids[unknown], batch.positions[unknown]
        found = zip(ids.tolist(), self._may_open(ids, positions, source), strict=True)
        return {request_id for request_id, may_open in found if may_open and not self.is_over(request_id, source)}

    def open_unclaimed(self, request_id: int, position: int, source: Source, now: float) -> Request:
        """Open a request that only its worker knows; the caller must check first that `refused` allows it."""
        shown_only = self.default_route == UNROUTED
        wait_ms = self._settings.request_timeout_ms if shown_only else self._settings.unclaimed_timeout_ms
        deadline, route = Deadline(now + wait_ms / 1000, after_ms=wait_ms), self.default_route
        request = self.table.open_unclaimed(request_id, position, source, deadline, route)
        self.counts.opened += 1
        return request

    def scored_by(self, request_id: int, source: Source, now: float) -> Request | None:
        """Return the request to which a stream's prompt scores belong, and open the request if it is unknown.

        Returns None if the request belongs to another stream, has ended, or cannot be opened.
        """
        request = self.table.get(request_id)
        if request is None:
            ids, positions = np.array([request_id], np.uint64), np.zeros(1, np.uint32)
            if self.is_over(request_id, source) or self.refused(ids, positions, source)[0]:
                return None
            return self.open_unclaimed(request_id, 0, source, now)
        is_its = self.table.stream_of(request) in (NO_STREAM, source.stream)
        return request if is_its and self.table.state_of(request) is not State.ENDED else None

    def failed_by(self, request_id: int, source: Source, now: float) -> Request | None:
        """Return the request to which a stream's error belongs, and open the request if it is unknown.

        Returns None if the error does not concern an open request of the stream. After a restart, the error may arrive
        before the client returns, and the hello of the worker no longer names the request.
        """
        request = self.scored_by(request_id, source, now)
        may_end = request is not None and self.table.state_of(request) in (State.RUNNING, State.RESUMED)
        return request if may_end else None

    def on_worker_has(self, request_id: int, source: Source) -> None:
        """Assign a request to a worker whose hello named it, or make the worker abort the request."""
        request = self.table.get(request_id)
        if request is None:
            if self.is_over(request_id, source):
                source.owners.pop(request_id, None)
                self.workers.abort(source.stream, request_id)
            return
        if self.table.state_of(request) is State.RESUMED:
            self._settle_owner(request, source.owners.get(request_id, NO_OWNER))
            if self.table.get(request_id) is not request:  # the request was closed, as its client is not the owner
                return
        state, stream = self.table.state_of(request), self.table.stream_of(request)
        if state is State.RUNNING and stream != source.stream:  # the request was dispatched to another worker meanwhile
            self.workers.abort(source.stream, request_id)
        elif stream == NO_STREAM and state is not State.ENDED:
            self.table.assign(request, source.stream)

    def _settle_owner(self, request: Request, owner: int) -> None:
        """Give a resumed request the owner in a worker's hello, and refuse any other client that has resumed it."""
        if owner in (NO_OWNER, request.owner):
            return
        consumer = self.consumer_of(request)
        request.owner = owner
        if consumer is not None:
            self.table.close(request, None)
            consumer.put_error(self.refuse_resume(request.id, consumer.name))
            self.table.forget_end(request.id)  # the owner may still resume the request

    def refuse_resume(self, request_id: int, client: str) -> RequestError:
        """Count an attempt to resume another client's request, and return the error for the attempt."""
        self.counts.refused_resumes += 1
        self._repeated_log.begin(("resume", client), _log.warning, "resume refused", client=client, request=request_id)
        return request_error(request_id, ErrorCode.ERROR_CODE_UNKNOWN_REQUEST, "this client has no such request")

    def consumer_of(self, request: Request) -> Session | None:
        return self.consumers.get(int(self.table.route[request.slot]))

    def is_read_by(self, request_id: int, session: Session) -> bool:
        request = self.table.get(request_id)
        return request is not None and self.consumer_of(request) is session

    def all_lag(self, stream: int) -> bool:
        """Return whether all clients with requests at a worker are behind, so that throttling delays no fast client."""
        consumers = map(self.consumers.get, set(self.table.route[self.table.stream == stream].tolist()))
        return not any(each is not None and each.keeps_up for each in consumers)

    def claim(self, resume: Resume, route: int, owner: int) -> Request:
        """Route later rows of a request to the consumer that resumes it; the caller delivers the waiting rows."""
        table = self.table
        request = table.get(resume.request_id)
        if request is None:
            request = table.resume(resume.request_id, resume.next_position, self._now())
        was_claimed = request.is_claimed
        table.claim(request, route, owner, drafts=resume.include_draft_logprobs)
        request.is_continuable = False
        if not was_claimed:
            table.set_deadline(request, self._deadline(resume.deadline_unix_ms))
            table.skip_to(request, resume.next_position)
        return request

    def finish(self, request: Request) -> None:
        self.counts.finished += 1
        if (consumer := self.consumer_of(request)) is not None:
            consumer.finish(request)
        if request.is_claimed:
            self.table.close(request, None)
        else:
            self.table.end(request, None)

    def fail(self, request: Request, code: ErrorCode, message: str, *, tell_worker: bool = True) -> None:
        """Fail a request with an error that contains the number of emitted tokens, unless the request has ended."""
        if self.table.get(request.id) is not request:
            return
        emitted = max(0, int(self.table.next_position[request.slot]))
        retry_after_ms = RETRY_MS if code in NOT_TAKEN else 0
        error = request_error(request.id, code, message, emitted_tokens=emitted, retry_after_ms=retry_after_ms)
        name = code_name(code)
        # Only known codes are counted by name, because a worker may send any number as a code.
        self.counts.failed[name if code in CODE_NAMES else "other"] += 1
        if tell_worker:
            self._abort_at_worker(request)
        ended = {"code": name, "reason": message, "request": request.id, "emitted_tokens": emitted}
        self._repeated_log.begin(name, _log.warning, "request ended with an error", **ended)
        consumer = self.consumer_of(request)
        if request.is_claimed or self.table.state_of(request) is State.ENDED:
            self.table.close(request, error)
        else:
            self.table.end(request, error)
        if consumer is not None:
            consumer.put_error(error)

    def end_continuable(self, why: str) -> None:
        """End the requests that clients can continue at another processor."""
        for request in self.table.open_requests():
            consumer = self.consumer_of(request)
            if request.is_continuable and consumer is not None and consumer.knows_others:
                self.fail(request, ErrorCode.ERROR_CODE_UNKNOWN_REQUEST, why)

    def end_continuable_of(self, stream: int, most: int, why: str) -> None:
        """At one worker, end at most `most` admitted requests that their clients can continue at another worker."""
        begun = [each for each in self.table.of_stream(stream) if each.generate is None and each.aborted_at is None]
        for request in [each for each in begun if each.is_continuable][:most]:
            self.fail(request, ErrorCode.ERROR_CODE_UNKNOWN_REQUEST, why)

    def evict(self, pending_ack: PendingAck, through: int) -> None:
        """Drop unclaimed requests whose oldest row delays this ack or any other ack of its stream up to `through`."""
        for request in self.table.open_requests():
            if request.waiting:
                found = request.waiting[0][0].pending_ack
                if found is pending_ack or (found.stream is pending_ack.stream and found.last_sequence <= through):
                    self._drop_unclaimed(request)

    def abort(self, request_id: int) -> None:
        """Ask the worker of a known request to abort the request, unless the worker was asked before."""
        request = self.table.get(request_id)
        if request is None or request.aborted_at is not None:
            return
        request.aborted_at = self._now()
        self.table.check_at(request, min(request.deadline.at, request.aborted_at + self._abort_timeout))
        self._abort_at_worker(request)

    def expire(self) -> None:
        """Expire overdue requests; the number of unclaimed requests that expire per tick is limited."""
        now = self._now()
        self._repeated_log.expire()
        unclaimed = 0
        for request in map(self.table.at, np.flatnonzero(self.table.due <= now).tolist()):
            unclaimed += not request.is_claimed
            if not request.is_claimed and unclaimed > _MOST_DROPPED:
                continue
            try:
                self._check(request, now)
            except Exception:  # noqa: BLE001 - only a defect of the processor raises here
                self.failed_ticks += 1
                self._repeated_log.begin("defect", _log.exception, "tick failed", request=request.id)
                if self.table.get(request.id) is request:
                    self.table.close(request, None)

    def _check(self, request: Request, now: float) -> None:
        if self.table.get(request.id) is not request:
            return  # the failure of an earlier request has ended this request, too
        if not request.is_claimed:
            self._drop_unclaimed(request)
        elif request.aborted_at is not None and now >= request.aborted_at + self._abort_timeout:
            why = f"aborted, but its worker did not confirm it within {self._settings.abort_timeout_ms} ms"
            self.fail(request, ErrorCode.ERROR_CODE_ABORTED, why)
        else:
            why = f"it did not end within its {request.deadline.after_ms} ms"
            self.fail(request, ErrorCode.ERROR_CODE_DEADLINE, why)

    def is_over(self, request_id: int, source: Source) -> bool:
        """Return whether a stream's request has ended, either at this processor or at its client.

        A request that ended at its client counts only until the worker has replayed its retained items, because the
        client may use the same id again later.
        """
        worker = self.workers.by_stream.get(source.stream)
        is_sent_again = worker is None or worker.reconcile is not None
        ended_here = self.table.ended(request_id) is not None
        return ended_here or (is_sent_again and self.table.has_ended_at_client(request_id))

    def client_ended(self, request_id: int, owner: int) -> None:
        """Drop the rows of an unclaimed request when its owner reports that the request has ended.

        After the loss of a processor, workers replay such rows. Keeping the rows would delay later acks.
        """
        request = self.table.get(request_id)
        source = None if request is not None else self.workers.source_of(request_id)
        if request is not None:
            if not request.is_claimed and request.owner in (NO_OWNER, owner):
                is_whole = self.table.state_of(request) is State.ENDED
                self._drop(request)
                self.table.note_end_at_client(request_id, owner)
                if is_whole:  # for an incomplete request, more rows may still arrive
                    self.table.forget_end(request_id)
        elif source is None:
            self.table.note_end_at_client(request_id, owner)
        elif source.owners[request_id] == owner:
            del source.owners[request_id]
            self.table.note_end_at_client(request_id, owner)
            self.workers.abort(source.stream, request_id)

    def _drop(self, request: Request) -> None:
        self._abort_at_worker(request)
        self.table.drop_rows(request)
        self.table.close(request, request.error)

    def _drop_unclaimed(self, request: Request) -> None:
        self.counts.unclaimed += 1
        self._drop(request)
        self._repeated_log.begin("unclaimed", _log.warning, "request dropped: no client claimed it", request=request.id)

    def _abort_at_worker(self, request: Request) -> None:
        if (stream := self.table.stream_of(request)) != NO_STREAM:
            self.workers.abort(stream, request.id)

    def end_all_of(self, stream: int, name: str, why: str) -> int:
        """Fail all requests of a lost worker, and return their number."""
        ended = self.table.of_stream(stream)
        for request in ended:
            self.fail(request, ErrorCode.ERROR_CODE_WORKER_LOST, f"worker {name} is lost: {why}", tell_worker=False)
        return len(ended)
