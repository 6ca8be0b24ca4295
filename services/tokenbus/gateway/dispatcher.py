"""Dispatcher: delivers each received row to its answer, and the error of a request after its rows."""

import asyncio
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from tokenbus.client import Client, RequestEnd, RequestFailedError, StepRows
from tokenbus.client.tokens import Turn
from tokenbus.client.weight_spans import WeightSpans
from tokenbus.delivery.step import FINISHED
from tokenbus.gateway.answer import Answer, Choice
from tokenbus.gateway.api_keys import Caller
from tokenbus.gateway.buffers import Backlog, Buffers, selected
from tokenbus.gateway.errors import ApiError, of_request
from tokenbus.gateway.event_writer import EventWriter, Left, Rows
from tokenbus.gateway.fairness import FairQueue
from tokenbus.gateway.rendered_step import RenderedStep, WaitingRow
from tokenbus.gateway.vocabulary import Vocabulary
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.metrics.families import Histogram
from tokenbus.settings import GatewaySettings
from tokenbus_contracts import ContractError, PromptScores
from tokenbus_contracts.generated.request_pb2 import Generate

_log = logger("gateway")
_ENDS = frozenset(map(int, FINISHED))
_SERVER_ERRORS = range(500, 600)
_ROWS_AT_ONCE = 64
_LONGEST_TURN_SECONDS = 0.01
"""Longest time, in seconds, of delivering rows without running other tasks.

Most steps need less time, so no other task delays their rows.
"""
_SLICE_SECONDS = 0.0005
"""Longest time, in seconds, of delivering the waiting rows of one answer before other answers get time."""
_OPENING_SECONDS = 0.003
"""Longest time, in seconds, of sending an answer's requests to the bus without running other tasks."""
_MOST_BEHIND = 64
"""Number of waiting steps above which answers are ended if their HTTP clients do not read."""
_LOOK_SECONDS = 0.02
"""Minimum time, in seconds, between two searches for unread answers, which make a system call for each answer."""
_MOST_GATHERED = 8
_MOST_TURNS = 64
"""Maximum number of ticks of the event loop for which the delivery of rows pauses."""
_UNREAD_SHARE = 16
"""If a sixteenth of an answer's buffer is unread, its HTTP client counts as not reading."""
_RESERVED_SHARE = 4
"""Prompt scores and repeated prompts may use a quarter of the memory for answers."""
_BACKLOG_SHARE = 8
"""The backlog of waiting steps may use an eighth of the memory for answers."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request whose last row has not been delivered."""

    request_id: int
    answer: Answer
    choice: Choice
    caller: Caller
    share: "_Share"
    rows: deque[WaitingRow | RequestFailedError] = field(default_factory=deque)
    is_held: bool = False
    """The stream's saved `is_held`, restored when no rows wait. While rows wait, the stream's `is_held` is true."""


class _Share:
    """The time used for delivering an answer's rows, and the requests of the answer that have waiting rows."""

    __slots__ = ("requests", "spent", "turn", "who")

    def __init__(self, who: Hashable) -> None:
        self.who = who
        self.requests: deque[OpenRequest] = deque()
        self.turn = self.spent = 0.0
        """The time at which the dispatcher last began to deliver rows, and the seconds spent on this answer since."""


class Dispatcher:
    """The only consumer of the steps that the bus client receives. All deliveries run on one event loop."""

    def __init__(  # noqa: PLR0913, PLR0917 - made in one place
        self,
        client: Client,
        vocabulary: Vocabulary,
        settings: GatewaySettings,
        buffers: Buffers,
        repeated_log: DeduplicatedLog,
        to_socket: Histogram,
    ) -> None:
        self._client = client
        self._vocabulary = vocabulary
        self._settings = settings
        self._buffers = buffers
        self._to_socket = to_socket
        self._weights = WeightSpans()
        self._writer = EventWriter(vocabulary, settings.max_requests)
        self._opened: dict[int, OpenRequest] = {}
        self._callers: dict[int, Caller] = {}
        """The callers by request id. An aborted request stays until the bus has ended it."""
        self.most_backlog = max(1, buffers.most // _BACKLOG_SHARE)
        self.backlog = Backlog(self.most_backlog // 4)
        self._waiting: FairQueue[_Share] = FairQueue()
        self._has_steps = asyncio.Event()
        self._received = 0
        self._looked = 0.0
        self._turn_began = 0.0
        self._repeated_log = repeated_log
        self.is_draining = False
        self._unsent = 0
        """Number of admitted requests that are not yet sent to the bus."""
        self.tokens = 0
        self.refused = 0

    def __len__(self) -> int:
        """Return the number of open requests, including aborted requests that have not yet ended on the bus."""
        return self._unsent + max(len(self._opened), len(self._client.requests))

    def running_and_waiting(self) -> dict[str, tuple[int, int]]:
        """Count each model's open requests: how many have a token, and how many have none. Any thread may call this."""
        found: dict[str, tuple[int, int]] = {}
        for one in list(self._opened.values()):
            running, waiting = found.get(one.answer.model, (0, 0))
            has_begun = one.choice.tokens > 0
            found[one.answer.model] = (running + has_begun, waiting + (not has_begun))
        return found

    async def run(self) -> None:
        """Receive steps and deliver their rows until cancelled.

        Every step is received at once, even if clients read slowly. Otherwise unacknowledged steps would pile up until
        the processor ends all requests of this gateway. Rows that pile up here are charged to their HTTP clients.
        """
        self._client.requests.on_scored = self._scored
        self._client.requests.on_cached = self._cached
        self._client.requests.on_turns = self._turns
        async with self._client.steps() as steps, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._deliver_all())
            async for output in steps:
                self._receive(output)
                if self.backlog.size > self.most_backlog:
                    await asyncio.sleep(0)  # many steps may arrive after a stall, so deliver some first
                    if self.backlog.size > self.most_backlog:
                        self._end_heaviest()

    def _scored(self, scores: PromptScores) -> None:
        one = self._opened.get(scores.request_id)
        if one is not None:
            one.choice.scored(scores, self._vocabulary)

    def _cached(self, request_id: int, tokens: int | None) -> None:
        one = self._opened.get(request_id)
        if one is not None:
            one.choice.cached_tokens = tokens

    def _turns(self, request_id: int, turns: Sequence[Turn]) -> None:
        one = self._opened.get(request_id)
        if one is not None:
            one.choice.turns = tuple(turns)

    def _receive(self, output: StepRows | RequestEnd) -> None:
        if isinstance(output, RequestEnd):
            caller = self._callers.pop(output.request_id, None)
            if caller is not None:
                caller.closed(output.request_id)
            if output.error is None:  # the request ended with its last row, or was aborted here
                return
        self.backlog.append(output)
        self._has_steps.set()
        self._received += 1
        now = monotonic()
        # Chunks for clients that do not read delay the chunks for other clients.
        if len(self.backlog) > _MOST_BEHIND and now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._buffers.evict_unread(self._settings.stream_buffer_bytes // _UNREAD_SHARE)

    async def _deliver_all(self) -> None:
        while True:
            while not self.backlog and not self._waiting.answers:
                self._has_steps.clear()
                await self._has_steps.wait()
                self._turn_began = monotonic()
            steps = self._next_steps()
            if steps:
                await self._deliver_steps(steps)
            if self._waiting.answers:
                await self._deliver_waiting()

    async def _deliver_steps(self, steps: Sequence[RenderedStep]) -> None:
        rows = Rows(self._writer, steps)
        for begin in range(0, len(rows), _ROWS_AT_ONCE):
            for request_id, left in rows.write(begin, min(begin + _ROWS_AT_ONCE, len(rows))):
                one = self._opened.get(request_id)
                if one is not None:
                    self._deliver_left(one, left)
            await self._end_long_turn()
        for step in steps:
            self.backlog.fit(step)
        self._to_socket.observe_all(rows.seconds())

    async def _deliver_waiting(self) -> None:
        """Deliver waiting rows, with a slice of time for each answer in rotation, until other tasks must run."""
        while self._waiting.answers and not self._is_turn_over():
            (who, share), began = self._waiting.take(), monotonic()
            while share.requests and monotonic() - began < _SLICE_SECONDS:
                one = share.requests.popleft()
                if one.rows:  # a closed request has no rows
                    self._deliver_some(one, began + _SLICE_SECONDS)
                if one.rows:
                    share.requests.append(one)
            self._waiting.give_back(who, share, has_more=bool(share.requests))
        await self._end_long_turn()

    def _deliver_some(self, one: OpenRequest, until: float) -> None:
        queue, stream = one.answer.queue, one.choice.stream
        stream.is_held = one.is_held
        queue.gather()
        while one.rows:
            waiting = one.rows.popleft()
            if isinstance(waiting, RequestFailedError):
                self._fail(one.request_id, waiting)
                break
            self._deliver(one, Left(waiting.step, waiting.row, None, is_rest=False))
            self.backlog.free(waiting)
            if monotonic() >= until:
                break
        queue.flush()
        one.is_held = stream.is_held
        stream.is_held |= bool(one.rows)
        stream.socket = queue.descriptor()

    def _deliver_left(self, one: OpenRequest, left: Sequence[Left]) -> None:
        """Deliver the rows of a request that the event writer left to Python.

        If the answer has used up its slice of time, rows wait, beginning with the first row that Python must write.
        """
        queue, stream, share, began = one.answer.queue, one.choice.stream, one.share, monotonic()
        if share.turn != self._turn_began:
            share.turn, share.spent = self._turn_began, 0.0
        is_heavy = share.spent >= _SLICE_SECONDS and began - self._turn_began >= _LONGEST_TURN_SECONDS
        if left[-1].events is None and (share.requests or is_heavy):
            written = 0 if one.rows else next((n for n, each in enumerate(left) if each.events is None), len(left))
            self._postpone(one, left[written:])
            left = left[:written]
        if len(left) > 1:
            queue.gather()
        for each in left:
            if one.request_id not in self._opened:  # the request has ended
                break
            self._deliver(one, each)
        if len(left) > 1:
            queue.flush()
        if stream.form is not None:
            stream.socket = queue.descriptor()
        share.spent += monotonic() - began

    def _postpone(self, one: OpenRequest, left: Iterable[Left]) -> None:
        """Queue rows of a request until the answer's next slice of time.

        Until that slice, the event writer also leaves the request's later rows to Python.
        """
        stream, share = one.choice.stream, one.share
        for waiting in (WaitingRow(each.step, each.row) for each in left):
            if not one.rows:
                one.is_held, stream.is_held = stream.is_held, True
                if not share.requests:
                    self._waiting.add(share.who, share)
                share.requests.append(one)
            one.rows.append(waiting)
            self.backlog.hold(waiting)

    def _next_steps(self) -> list[RenderedStep]:
        """Deliver errors of requests until a step comes. Return the steps that wait before the next error.

        Delivering several steps together needs only one pass over the requests.
        """
        steps: list[RenderedStep] = []
        while self.backlog and len(steps) < _MOST_GATHERED:
            if steps and self.backlog.begins_with_error:
                break
            output = self.backlog.popleft()
            if isinstance(output, RequestEnd):
                if output.error is not None:
                    self._fail(output.request_id, output.error)
                continue
            target, draft = output
            self.tokens += int(target.token_counts.sum())
            self._weights.note(target.header.weight_version, target.request_ids, target.positions, self._opened)
            rows = target if len(self._opened) >= target.row_count else selected(target, self._opened)
            if rows is not None:
                steps.append(RenderedStep(rows, self._vocabulary, draft, self._weights))
        return steps

    async def _end_long_turn(self) -> None:
        """If rows were delivered for too long, let other tasks run until a tick of the event loop receives no step."""
        if not self._is_turn_over():
            return
        for _ in range(_MOST_TURNS):
            before = self._received
            await asyncio.sleep(0)
            if self._received == before:
                break
        self._turn_began = monotonic()

    def _is_turn_over(self) -> bool:
        return monotonic() - self._turn_began >= _LONGEST_TURN_SECONDS

    def _end_heaviest(self) -> None:
        """End the answers that use the most memory, including waiting rows, until half of the backlog is free."""
        self.backlog.keep(self._opened)
        if self.backlog.size <= self.most_backlog:  # the removed steps belonged to ended requests
            return
        beside: Counter[Answer] = Counter()
        for request_id, weight in self.backlog.weights().items():
            if request_id in self._opened:
                beside[self._opened[request_id].answer] += weight
        for one in self._opened.values():  # estimate from one row, because a request may have many rows
            if one.rows and isinstance(one.rows[0], WaitingRow):
                step = one.rows[0].step
                beside[one.answer] += len(one.rows) * (step.size // step.batch.row_count)
        self._buffers.evict(sum(beside.values()) // 2, beside)
        self.backlog.keep(self._opened)

    async def open(
        self,
        request_ids: Sequence[int],
        generates: Iterable[Generate],
        answer: Answer,
        caller: Caller,
        reserved: int = 0,
    ) -> None:
        """Send the requests of an answer to the bus. If one is refused, abort the other requests and raise an ApiError.

        Other tasks may run between two requests. If the answer ends early, the remaining requests are not sent.
        `reserved` is the number of bytes to charge for the answer's request and for prompt scores, which arrive later.
        """
        if self.is_draining:
            raise self._refusal(503, "the gateway is stopping", "stopping")
        if refusal := self._client.refusal:  # otherwise the requests would wait for a processor that refuses them
            raise self._refusal(503, f"the processor refuses this gateway: {refusal}", "no_processor")
        caller.check_room(len(request_ids))
        self._check_room(len(request_ids), reserved)
        caller.open(request_ids)
        answer.queue.reserve(reserved)
        self._unsent += len(request_ids)
        left = deque(request_ids)
        try:
            await self._open_all(left, generates, answer, caller)
        except (RequestFailedError, ContractError) as error:
            self.close(request_ids)
            if isinstance(error, RequestFailedError):
                raise of_request(error, self._settings.retry_after_ms) from None
            raise ApiError(400, str(error), code="invalid_value") from None
        finally:
            self._unsent -= len(left)
            for request_id in left:
                caller.closed(request_id)

    async def _open_all(self, left: deque[int], generates: Iterable[Generate], answer: Answer, caller: Caller) -> None:
        share, began = _Share(answer.who), monotonic()
        for generate, choice in zip(generates, answer.choices, strict=True):
            if monotonic() - began >= _OPENING_SECONDS:
                await self._buffers.turns.next()
                began = monotonic()
            if answer.queue.is_closed:
                return
            generate.request_id = left[0]
            generate.tokenizer_digest = self._vocabulary.digest
            request_id = self._client.submit(generate)
            self._callers[request_id] = caller
            self._opened[request_id] = OpenRequest(request_id, answer, choice, caller, share)
            self._writer.open(request_id, choice.stream)
            left.popleft()
            self._unsent -= 1

    def _check_room(self, requests: int, reserved: int) -> None:
        most, opened = self._settings.max_requests, len(self)
        if requests > most:  # not a 429, because waiting would not help
            message = f"n: at most {most} choices (gateway.max_requests), got {requests}"
            raise ApiError(400, message, param="n", code="invalid_value")
        if opened + requests > most:
            message = f"open requests: at most {most}, got {opened} and {requests} more"
            raise self._refusal(429, message, "overloaded")
        held, room = self._buffers.reserved, self._buffers.most // _RESERVED_SHARE
        if reserved and held + reserved > room:
            message = f"repeated long prompts and prompts' scores: at most {room} bytes at once"
            raise self._refusal(429, f"{message} (gateway.buffer_bytes), got {held} and {reserved} more", "overloaded")

    def close(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            if self._forget(request_id) is not None:
                self._client.abort(request_id)

    def revoke(self, caller: Caller) -> None:
        for one in [each for each in self._opened.values() if each.caller is caller]:
            one.choice.end(ApiError(401, "the API key was revoked", code="invalid_api_key"))
            self.close([one.request_id])

    def give_up(self) -> None:
        for one in list(self._opened.values()):
            self.close([one.request_id])
            one.choice.end(ApiError(503, "the gateway stopped before the request had ended", code="stopping"))

    def _refusal(self, status: int, message: str, code: str) -> ApiError:
        self.refused += 1
        return ApiError(status, message, code=code, retry_after_ms=self._settings.retry_after_ms)

    def _deliver(self, one: OpenRequest, left: Left) -> None:
        step, row, events, is_rest = left
        queue, wants_more = one.answer.queue, True
        try:
            if events is None:
                wants_more = one.choice.take(step, row)
            elif is_rest and queue.direct is not None:
                queue.direct.send_rest(events)
            else:
                one.answer.put_events(events, step.produced_at_ns)
        except Exception:  # noqa: BLE001 - a defect in one answer must not end all others
            self._repeated_log.begin("row", _log.exception, "a row could not be written")
            one.choice.end(ApiError(500, "a defect of the gateway; its log says more", code="internal"))
            wants_more = False
        if step.statuses[row] in _ENDS:
            self._forget(one.request_id)
        elif not wants_more:  # only the gateway saw the stop, so the worker still computes
            self._forget(one.request_id)
            self._client.abort(one.request_id)

    def _forget(self, request_id: int) -> OpenRequest | None:
        self._writer.close(request_id)
        self._weights.forget(request_id)
        one = self._opened.pop(request_id, None)
        if one is not None:
            for waiting in one.rows:
                if isinstance(waiting, WaitingRow):
                    self.backlog.free(waiting)
            one.rows.clear()
        return one

    def _fail(self, request_id: int, error: RequestFailedError) -> None:
        """End a request with an error after its waiting rows are delivered."""
        one = self._opened.get(request_id)
        if one is None:
            return
        if one.rows:
            one.rows.append(error)
            return
        self._forget(request_id)
        # Undelivered tokens count as not emitted, because a client that resumes must not skip them.
        error.emitted_tokens = min(error.emitted_tokens, one.choice.tokens)
        failure = of_request(error, self._settings.retry_after_ms)
        if failure.status in _SERVER_ERRORS:
            values = {"request": request_id, "code": failure.code, "reason": failure.message}
            self._repeated_log.begin(("failed", failure.code), _log.warning, "request failed", **values)
        one.choice.end(failure)
