"""RequestRegistry: how requests begin, change hands and end."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import ErrorCode, Generate, RequestError
from tokenbus_services.delivery import Hold, RequestTokens
from tokenbus_services.delivery.errors import brief, code_name
from tokenbus_services.logs import DeduplicatedLog, logger
from tokenbus_services.processor.buffers import Buffers
from tokenbus_services.processor.requests import NO_OWNER, NO_STREAM, Payer, Request, RequestTable, Source, State
from tokenbus_services.processor.router import BUFFERED, NOBODY, Consumer, Router
from tokenbus_services.processor.worker import Worker
from tokenbus_services.settings import ProcessorSettings

_log = logger("processor")


class Time(Protocol):
    """Tells the time, twice: as a clock that never goes back, and as moments that other processes know, too."""

    def now(self) -> float:
        """Return seconds of a clock that never goes back."""

    def unix_ms(self) -> int:
        """Return milliseconds since 1970-01-01 UTC."""


@dataclass(slots=True)
class RequestCounts:
    """How requests began and ended, in requests."""

    opened: int = 0
    finished: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    unclaimed: int = 0


class RequestRegistry:
    """Owns the table of requests; every change of a request's state that is not a row's goes through here."""

    def __init__(self, settings: ProcessorSettings, clock: Time) -> None:
        """Begin without requests."""
        self._settings = settings
        self._now = clock.now
        self._unix_ms = clock.unix_ms
        self.table = RequestTable(settings.max_requests, settings.ended_requests, settings.requests_per_peer)
        self.buffers = Buffers(self.table, settings.request_buffer_rows)
        self.router = Router(self.table, self, settings.request_buffer_rows)
        self.router.consumers[BUFFERED] = self.buffers
        self.default_route = BUFFERED
        self.counts = RequestCounts()
        self.abort_at_worker: Callable[[int, int], None] = lambda _stream, _key: None
        self.workers: Mapping[int, Worker] = {}
        """The workers that are there, or may come back, by stream."""
        self.has_iterators = False
        """Whether requests are iterated over in this process, which may let their workers wait."""
        self.on_vouched: Callable[[Request, int], None] = lambda _request, _owner: None
        """Learns from a worker whose a request is that was resumed before."""
        self._repeated_log = DeduplicatedLog()
        self.failed_ticks = 0

    # How they begin.

    def submit(self, generate: Generate, stream: int, route: int, owner: int = NO_OWNER) -> Request:
        """Open a request that was asked for here, and that a worker is being told of; without a stream, later."""
        seconds = self._seconds_for(generate.deadline_unix_ms)
        if generate.deadline_ms:
            seconds = min(seconds, generate.deadline_ms / 1000)
        state = State.HANDED_OFF if stream == NO_STREAM else State.OPEN
        request = self.table.open(generate.request_key, 0, stream, state, self._now() + seconds, _client(owner))
        request.deadline_unix_ms = self._unix_ms() + int(seconds * 1000)
        request.generate = Generate()
        request.generate.CopyFrom(generate)
        request.generate.owner = request.owner = owner
        request.generate.deadline_unix_ms = request.deadline_unix_ms
        request.is_claimed = True
        self.table.route[request.slot] = route
        self.table.wants_draft[request.slot] = generate.include_draft_logprobs
        self.counts.opened += 1
        return request

    def _seconds_for(self, deadline_unix_ms: int) -> float:
        """Return how long a request may still take that ends at some moment; zero: the peer knows of none."""
        most = self._settings.request_timeout_ms
        if deadline_unix_ms:
            most = min(most, deadline_unix_ms - self._unix_ms())
        return max(0, most) / 1000

    def make_room(self) -> bool:
        """Drop the oldest request that was not asked for, of the worker that brought most; False if there is none."""
        request = self.table.oldest_unasked()
        if request is None:
            return False
        self._drop_unclaimed(request)
        return True

    def hand_to(self, request: Request, stream: int) -> None:
        """Learn that a worker is being told of a request that had waited for one."""
        self.table.owner[request.slot] = stream
        self.table.state[request.slot] = State.OPEN

    def meet(self, key: int, position: int, source: Source, now: float) -> Request | None:
        """Open a request that a stream brought, or return None: it cannot be one."""
        shown_only = self.default_route == NOBODY
        begins_here = position == 0 or shown_only
        may_be = begins_here or source.is_resumed or source.takes_over or key in source.owners
        if not may_be or not self.table.has_room_for(source.payer):
            self.abort_at_worker(source.stream, key)
            return None
        wait = self._settings.request_timeout_ms if shown_only else self._settings.unclaimed_timeout_ms
        is_its = begins_here or (key in source.owners and not source.takes_over)
        owner, state = source.stream if is_its else NO_STREAM, State.OPEN if begins_here else State.WAITING
        request = self.table.open(key, position, owner, state, now + wait / 1000, source.payer)
        request.owner = source.owners.get(key, NO_OWNER)
        self.table.route[request.slot] = self.default_route
        request.is_claimed = shown_only
        if not shown_only:
            self.buffers.open(request)
        self.counts.opened += 1
        return request

    def answer(self, key: int, source: Source) -> None:
        """Learn that a stream has a request that is known here, before any row of it came."""
        request = self.table.get(key)
        if request is None:
            if self.table.ended(key) is not None:  # as when its worker had been given up
                self.abort_at_worker(source.stream, key)
            return
        if request.is_claimed and self.is_unvouched(request):
            self.on_vouched(request, source.owners.get(key, NO_OWNER))
        owner = int(self.table.owner[request.slot])
        if owner not in (NO_STREAM, source.stream) and self.table.state[request.slot] == State.OPEN:
            if not source.takes_over:
                self.abort_at_worker(source.stream, key)  # it was asked for again, and another has it now
            return
        # One that takes over may have it before the stream it came from has let go.
        if self.table.owner[request.slot] == NO_STREAM and not source.takes_over:
            self.table.owner[request.slot] = source.stream
            if self.table.state[request.slot] == State.HANDED_OFF:
                self.table.state[request.slot] = State.OPEN

    # How they change hands.

    def consumer_of(self, request: Request) -> Consumer | None:
        """Return who takes a request's rows."""
        return self.router.consumers.get(int(self.table.route[request.slot]))

    def source_of(self, key: int) -> Source | None:
        """Return the stream whose worker said in its hello that it has a request."""
        return next((each.source for each in self.workers.values() if key in each.source.owners), None)

    def is_unvouched(self, request: Request) -> bool:
        """Tell whether a request was only resumed: no worker has said yet that it has it."""
        is_free = self.table.owner[request.slot] == NO_STREAM and self.table.state[request.slot] == State.HANDED_OFF
        return bool(is_free) and request.generate is None and request.handed_off_by == NO_STREAM

    def disown(self, request: Request) -> None:
        """Let a request wait for its owner: who resumed it was another."""
        request.is_claimed = False
        self.table.charge(request, None)
        self.table.route[request.slot] = BUFFERED
        self.table.state[request.slot] = State.WAITING
        request.handed_off_at = None
        self.table.due[request.slot] = self._now() + self._settings.unclaimed_timeout_ms / 1000
        self.buffers.open(request)

    def claim(  # noqa: PLR0913 - what a client says of a request
        self,
        key: int,
        position: int,
        route: int,
        *,
        drafts: bool,
        owner: int = NO_OWNER,
        deadline_unix_ms: int = 0,
    ) -> Request:
        """Lead a request's further rows to a consumer that holds its tokens up to a position.

        What waits for it already is the caller's to take over, before `settle` lets go on what waited for this.
        """
        now = self._now()
        request = self.table.get(key)
        if request is None:
            request = self.table.open(key, position, NO_STREAM, State.WAITING, now)
            self.buffers.open(request)
        was_claimed, request.is_claimed = request.is_claimed, True
        request.owner = owner
        self.table.charge(request, _client(owner))
        self.table.route[request.slot] = route
        self.table.wants_draft[request.slot] = drafts
        if not was_claimed:
            seconds = self._seconds_for(deadline_unix_ms)
            request.deadline = now + seconds
            request.deadline_unix_ms = self._unix_ms() + int(seconds * 1000)
            waiting = self.table.state[request.slot] == State.WAITING
            grace = now + self._settings.unclaimed_timeout_ms / 1000
            self.table.due[request.slot] = min(grace, request.deadline) if waiting else request.deadline
            if request.handed_off_at is not None:  # whoever is to go on with it has no more time for that
                self.table.look_again(request, request.handed_off_at + self._settings.handoff_timeout_ms / 1000)
        if self.table.state[request.slot] == State.WAITING:
            self.table.next_position[request.slot] = position
            request.first_position = position
            if self.table.owner[request.slot] == NO_STREAM:  # whichever stream goes on at this place has it
                self.table.state[request.slot] = State.HANDED_OFF
                request.handed_off_at = now
            else:
                self.table.state[request.slot] = State.OPEN
        return request

    def take_over(self, key: int, source: Source) -> Request | None:
        """Learn that a worker goes on with a request that another began, and return it if it has it from now on."""
        request = self.table.get(key)
        if request is None:
            if self.table.ended(key) is not None:
                self.abort_at_worker(source.stream, key)
            return None
        state, owner = State(self.table.state[request.slot]), int(self.table.owner[request.slot])
        if state is State.HANDED_OFF and request.handed_off_by != NO_STREAM:
            self._inherit(request, source.stream)
            return request
        # Who has it has not let go yet, as far as came here: these are two streams.
        if owner != source.stream:
            self.table.heir[request.slot] = source.stream
            request.is_inherited = True
        return None

    def _inherit(self, request: Request, stream: int) -> None:
        self.table.give(request, stream)
        if request.aborted_at is not None:  # while nobody had it, nobody could be told
            self.abort_at_worker(stream, request.key)

    def hand_off(self, request: Request, now: float) -> None:
        """Let another stream go on with a request: the one that has it already, or one that does so in time."""
        request.handed_off_by = int(self.table.owner[request.slot])
        if request.is_inherited:
            self._inherit(request, int(self.table.heir[request.slot]))
            return
        self.table.state[request.slot] = State.HANDED_OFF
        self.table.owner[request.slot] = NO_STREAM
        request.handed_off_at = now
        self.table.look_again(request, now + self._settings.handoff_timeout_ms / 1000)

    def settle(self, request: Request) -> None:
        """Go on after a claim: hand out what came early, and close what has ended."""
        if self.table.state[request.slot] == State.ENDED:
            self.table.close(request, None)
        elif request.early:
            self.router.recall(request, self._now())

    # How they end.

    def finish(self, request: Request, status: RowStatus) -> None:
        """End a request that has had its last row."""
        self.counts.finished += 1
        if (consumer := self.consumer_of(request)) is not None:
            consumer.finish(request, status)
        self._let_go_of_early(request)
        if request.is_claimed:
            self.table.close(request, None)
        else:
            self.table.state[request.slot] = State.ENDED
            self.table.owner[request.slot] = NO_STREAM

    def fail(self, request: Request, code: ErrorCode, message: str, *, tell_worker: bool = True) -> None:
        """End a request with an error that says how far it got."""
        slot = request.slot
        emitted = max(0, int(self.table.next_position[slot]))
        error = RequestError(request_key=request.key, code=code, message=brief(message, code), emitted_tokens=emitted)
        name = code_name(code)
        # A worker may send any number for a code: a count for each would let it fill the memory.
        counted = name if code in ErrorCode.values() else "other"
        self.counts.failed[counted] = self.counts.failed.get(counted, 0) + 1
        owner = int(self.table.owner[slot])
        if tell_worker and owner != NO_STREAM:
            self.abort_at_worker(owner, request.key)
        self._abort_at_others(request)
        self._repeated_log.begin(
            name,
            _log.warning,
            "request ended with an error",
            code=name,
            reason=message,
            request=request.key,
            emitted_tokens=emitted,
        )
        if (consumer := self.consumer_of(request)) is not None:
            consumer.fail(request, error)
        self._let_go_of_early(request)
        if request.is_claimed or self.table.state[slot] == State.ENDED:
            self.table.close(request, error)
        else:
            self.table.state[slot] = State.ENDED
            self.table.owner[slot] = NO_STREAM

    def end_slow(self, request: Request) -> None:
        """End a request whose rows wait here and are not taken; they are dropped, so that they hold nobody back."""
        tokens = self.buffers.tokens_of(request)
        waiting = f"its consumer left {len(tokens)} steps' tokens waiting, from token {tokens.position} on"
        self.fail(request, ErrorCode.ERROR_CODE_SLOW_CLIENT, waiting)
        self.buffers.forget(tokens)

    def check_buffers(self, held_items: int) -> None:
        """End the requests that have too many rows waiting here, or let that slow their workers down.

        A row waits only while its step is held: a request's rows are at most as many as a stream's held items.
        """
        for tokens in self.buffers.check(held_items):
            request = self.table.get(tokens.request_id)
            if request is not None and self._settings.slow_consumer == "end":
                self.end_slow(request)

    def evict_slowest(self, hold: Hold, through: int) -> None:
        """End the requests whose rows wait here and hold a stream back the longest.

        Of those that no client asked for, all go at once that hold it back up to a sequence.
        """
        for request in self.table.open_requests():
            if any(early.step.hold is hold for early in request.early):
                self.fail(request, ErrorCode.ERROR_CODE_GAP, "what comes before its waiting tokens did not come")
                continue
            if self.table.route[request.slot] != BUFFERED:
                continue
            step = self.buffers.tokens_of(request).oldest()
            if step is None:
                continue
            if not request.is_claimed:
                if step.hold is hold or (step.hold.stream is hold.stream and step.hold.last_sequence <= through):
                    self._drop_unclaimed(request)
            elif step.hold is not hold:
                continue
            elif self._settings.slow_consumer == "end":
                self.end_slow(request)

    def abort(self, key: int) -> None:
        """Ask the worker that has a request to end it; what has ended or was never known needs no end."""
        request = self.table.get(key)
        if request is None or request.aborted_at is not None:
            return
        request.aborted_at = self._now()
        self.table.look_again(request, request.aborted_at + self._settings.abort_timeout_ms / 1000)
        if (owner := int(self.table.owner[request.slot])) != NO_STREAM:
            self.abort_at_worker(owner, key)

    def expire(self) -> None:
        """End what has waited too long."""
        now = self._now()
        self._repeated_log.expire()
        for request in self.table.due_requests(now):
            try:
                self._look_at(request, now)
            except Exception:  # noqa: BLE001 - a defect of ours must not keep the others from their turn
                self.failed_ticks += 1
                self._repeated_log.begin("defect", _log.exception, "tick failed", request=request.key)
                self.table.close(request, None)

    def _look_at(self, request: Request, now: float) -> None:
        settings, state = self._settings, State(self.table.state[request.slot])
        if not request.is_claimed:
            self._drop_unclaimed(request)
            return
        if request.aborted_at is not None and now >= request.aborted_at + settings.abort_timeout_ms / 1000:
            self.fail(request, ErrorCode.ERROR_CODE_ABORTED, "aborted, and its worker did not say so in time")
            return
        if now >= request.deadline:
            self.fail(request, ErrorCode.ERROR_CODE_DEADLINE, "it took longer than it may")
            return
        times = [request.deadline]
        handoff = settings.handoff_timeout_ms / 1000
        if request.aborted_at is not None:
            times.append(request.aborted_at + settings.abort_timeout_ms / 1000)
        if state is State.HANDED_OFF and request.handed_off_at is not None:
            given_up_at = now + handoff if self._is_between_workers(request) else request.handed_off_at + handoff
            if now >= given_up_at:
                self._fail_handed_off(request)
                return
            times.append(given_up_at)
        self.table.due[request.slot] = min(times)

    def _is_between_workers(self, request: Request) -> bool:
        """Tell whether both workers of a hand-off are there: then they say so themselves if it fails.

        The decode worker's word comes in the order of its stream, behind all that it has not sent yet, however long
        that takes; only where one of them is gone its silence means anything.
        """
        target = int(self.table.heir[request.slot])
        return request.handed_off_by in self.workers and target in self.workers

    def _fail_handed_off(self, request: Request) -> None:
        expected = int(self.table.next_position[request.slot])
        if request.early:
            first = min(int(early.step.rows.positions[0]) for early in request.early)
            self.fail(request, ErrorCode.ERROR_CODE_GAP, f"tokens {expected} to {first - 1} never came")
        elif request.first_position == expected:
            self.fail(request, ErrorCode.ERROR_CODE_UNKNOWN_REQUEST, "no worker has it")
        else:
            self.fail(request, ErrorCode.ERROR_CODE_HANDOFF, "no worker went on with it after it was handed off")

    def _drop_unclaimed(self, request: Request) -> None:
        self.counts.unclaimed += 1
        tokens = self.buffers.tokens_of(request)
        if (owner := int(self.table.owner[request.slot])) != NO_STREAM:
            self.abort_at_worker(owner, request.key)
        self._abort_at_others(request)
        self._let_go_of_early(request)
        self.buffers.forget(tokens)
        self.table.close(request, tokens.error)
        self._repeated_log.begin("unclaimed", _log.warning, "nobody asked for a request's tokens", request=request.key)

    def _abort_at_others(self, request: Request) -> None:
        """End a request that ends at whoever else works on it: it may have changed hands without our knowing all."""
        others = {early.source.stream for early in request.early}
        if request.is_inherited:
            others.add(int(self.table.heir[request.slot]))
        for stream in sorted(others - {int(self.table.owner[request.slot])}):
            self.abort_at_worker(stream, request.key)

    def _let_go_of_early(self, request: Request) -> None:
        for early in request.early:
            early.step.hold.release()
        request.early = []

    def end_those_of(self, stream: int, name: str, why: str) -> int:
        """End every request that a stream has or was to go on with: its worker is lost. Return how many."""
        ended = self.table.of_stream(stream)
        for request in ended:
            self.fail(request, ErrorCode.ERROR_CODE_WORKER_LOST, f"worker {name} is lost: {why}", tell_worker=False)
        heirless = 0
        for request in self.table.of_heir(stream):
            self.table.heir[request.slot] = NO_STREAM
            if request.is_inherited or self.table.state[request.slot] == State.HANDED_OFF:
                heirless += 1
                lost = f"decode worker {name} is lost before it went on: {why}"
                self.fail(request, ErrorCode.ERROR_CODE_HANDOFF, lost)
        return len(ended) + heirless

    def between(self, key: int, stream: int) -> Request | None:
        """Return a request that a stream let go of and nobody has yet, or that it has before the other let go."""
        request = self.table.get(key)
        if request is None:
            return None
        let_go = self.table.state[request.slot] == State.HANDED_OFF and request.handed_off_by == stream
        has_it = request.is_inherited and self.table.heir[request.slot] == stream
        return request if let_go or has_it else None

    def close(self, message: str) -> None:
        """End the requests that are iterated over in this process: nothing more comes. Their workers keep them."""
        for request in self.table.open_requests():
            if request.is_claimed and self.table.route[request.slot] == BUFFERED:
                self.fail(request, ErrorCode.ERROR_CODE_ABORTED, message, tell_worker=False)

    def tokens(self, key: int, position: int = 0) -> RequestTokens:
        """Claim a request for an iterator in this process, and return that."""
        self.has_iterators = True
        request = self.claim(key, position, BUFFERED, drafts=True)
        tokens = self.buffers.adopt(request)
        tokens.position = position
        self.settle(request)
        return tokens


def _client(owner: int) -> Payer | None:
    """Return what counts the requests of a client; this process's own are not counted."""
    return None if owner == NO_OWNER else ("client", owner)
