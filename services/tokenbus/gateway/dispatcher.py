"""Dispatcher: hands each row that the client receives to its answer, and each request's error after its rows."""

import asyncio
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from tokenbus.client import Client, RequestEnd, RequestFailedError, StepRows
from tokenbus.client.tokens import Turn
from tokenbus.client.weight_spans import WeightSpans
from tokenbus.delivery.step import FINISHED
from tokenbus.gateway.answer import Answer, Listener
from tokenbus.gateway.api_keys import Caller
from tokenbus.gateway.buffers import Backlog, Buffers, selected
from tokenbus.gateway.errors import ApiError, of_request
from tokenbus.gateway.event_writer import EventWriter, Left
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
_SERVERS = range(500, 600)
"""The statuses of errors that are not the HTTP client's fault."""
_ROWS_AT_ONCE = 64
_LONGEST_TURN_SECONDS = 0.01
"""After so long other tasks run. A step's rows are best written without a break: a task in between delays them."""
_SLICE_SECONDS = 0.0005
"""Of one answer, where rows wait."""
_OPENING_SECONDS = 0.003
"""The longest time without other tasks while an answer's requests are sent to the bus."""
_MOST_BEHIND = 64
"""Steps that may wait to be handed out before answers whose HTTP clients do not read are ended."""
_LOOK_SECONDS = 0.02
"""How often they are looked for: it takes a system call for each answer."""
_MOST_GATHERED = 8
_MOST_TURNS = 64
"""How many steps are taken at most before rows are handed out again."""
_UNREAD_SHARE = 16
"""An answer that holds this part of its buffer counts as one whose HTTP client does not read."""
_RESERVED_SHARE = 4
"""Scores and repeated prompts may hold this part of what answers may: less than waits here at the processor."""
_BACKLOG_SHARE = 8
"""The backlog may hold this part of `gateway.buffer_bytes`."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One request that has not ended."""

    request_id: int
    answer: Answer
    listener: Listener
    caller: Caller
    share: "_Share"
    rows: deque[WaitingRow | RequestFailedError] = field(default_factory=deque)
    """Rows that wait for a turn, and the error behind them."""
    is_held: bool = False
    """Whether Python takes the first of these rows' followers, too; while rows wait it takes all."""


class _Share:
    """One answer's share of the event loop's time."""

    __slots__ = ("requests", "spent", "turn", "who")

    def __init__(self, who: Hashable) -> None:
        self.who = who
        """Its client: a key, or a machine."""
        self.requests: deque[OpenRequest] = deque()
        """Its requests with rows that wait."""
        self.turn = self.spent = 0.0
        """When its last turn began, and the seconds that its rows took there."""


class Dispatcher:
    """The one consumer of the client's steps. All of it runs on one event loop."""

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
        """By request id, until the bus has ended it, which for an aborted one is later than here."""
        self.most_backlog = max(1, buffers.most // _BACKLOG_SHARE)
        self.backlog = Backlog(self.most_backlog // 4)
        self._waiting: FairQueue[_Share] = FairQueue()
        """The answers with rows that wait for a turn."""
        self._came = asyncio.Event()
        self._taken = 0
        self._looked = 0.0
        self._turn_began = 0.0
        self._repeated_log = repeated_log
        self.is_draining = False
        self._unsent = 0
        """How many requests of answers that are being opened were not sent to the bus yet."""
        self.tokens = 0
        self.refused = 0

    def __len__(self) -> int:
        """Return how many requests are open, those included that the bus has not ended yet."""
        return self._unsent + max(len(self._opened), len(self._client.requests))

    def begun(self) -> dict[str, tuple[int, int]]:
        """Return by model how many open requests had a token, and how many had none yet; from any thread."""
        found: dict[str, tuple[int, int]] = {}
        for one in list(self._opened.values()):
            running, waiting = found.get(one.answer.model, (0, 0))
            has_begun = one.listener.tokens > 0
            found[one.answer.model] = (running + has_begun, waiting + (not has_begun))
        return found

    async def run(self) -> None:
        """Take steps from the bus as they come and hand out their rows, until cancelled; requests need it to run.

        A step that is not taken is not acked, and what is not acked piles up at the processor until it ends every
        request of this gateway. So every step is taken at once, and what piles up here is charged to its HTTP client.
        """
        self._client.requests.on_scored = self._scored
        self._client.requests.on_cached = self._cached
        self._client.requests.on_turns = self._turns
        async with self._client.steps() as steps, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hand_out())
            async for output in steps:
                self._take(output)

    def _scored(self, scores: PromptScores) -> None:
        """Give a request what the model says of its prompt: it comes before the step with its first row."""
        one = self._opened.get(scores.request_id)
        if one is not None:
            one.listener.scored(scores, self._vocabulary)

    def _cached(self, request_id: int, tokens: int | None) -> None:
        one = self._opened.get(request_id)
        if one is not None:
            one.listener.cached_tokens = tokens

    def _turns(self, request_id: int, turns: Sequence[Turn]) -> None:
        one = self._opened.get(request_id)
        if one is not None:
            one.listener.turns = tuple(turns)

    def _take(self, output: StepRows | RequestEnd) -> None:
        if isinstance(output, RequestEnd):
            caller = self._callers.pop(output.request_id, None)
            if caller is not None:
                caller.closed(output.request_id)
            if output.error is None:  # its last row says so, or this gateway aborted it
                return
        self.backlog.append(output)
        self._came.set()
        self._taken += 1
        now = monotonic()
        # Chunks for clients that do not read delay those for clients that do.
        if len(self.backlog) > _MOST_BEHIND and now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._buffers.evict_unread(self._settings.stream_buffer_bytes // _UNREAD_SHARE)
        if self.backlog.size > self.most_backlog:
            self._end_heaviest()

    async def _hand_out(self) -> None:
        while True:
            while not self.backlog and not self._waiting.answers:
                self._came.clear()
                await self._came.wait()
                self._turn_began = monotonic()
            steps = self._steps()
            if steps:
                await self._hand_steps(steps)
            if self._waiting.answers:
                await self._hand_waiting()

    async def _hand_steps(self, views: Sequence[RenderedStep]) -> None:
        """Hand out the rows of some steps, those of one request together, so that they are one write."""
        rows = self._writer.rows_of(views)
        for begin in range(0, len(rows), _ROWS_AT_ONCE):
            for key, left in rows.write(begin, min(begin + _ROWS_AT_ONCE, len(rows))):
                one = self._opened.get(key)
                if one is not None:
                    self._hand_left(one, left)
            await self._end_long_turn()
        for view in views:
            self.backlog.fit(view)
        self._to_socket.observe_all(rows.seconds())

    async def _hand_waiting(self) -> None:
        """Hand out rows that wait for one turn, and then let other tasks run.

        An answer has a slice of the turn, and then the next one.
        """
        while self._waiting.answers and not self._is_turn_over():
            (who, share), began = self._waiting.take(), monotonic()
            while share.requests and monotonic() - began < _SLICE_SECONDS:
                one = share.requests.popleft()
                if one.rows:  # else it was closed
                    self._hand_some(one, began + _SLICE_SECONDS)
                if one.rows:
                    share.requests.append(one)
            self._waiting.give_back(who, share, has_more=bool(share.requests))
        await self._end_long_turn()

    def _hand_some(self, one: OpenRequest, until: float) -> None:
        """Hand out rows of a request that wait, at least one, as long as there is time."""
        outbox, stream = one.answer.outbox, one.listener.stream
        if stream is not None:
            stream.is_held = one.is_held
        outbox.gather()
        while one.rows:
            row = one.rows.popleft()
            if isinstance(row, RequestFailedError):
                self._fail(one.request_id, row)
                break
            self._hand(one, Left(row.step, row.place, None, is_rest=False))
            self.backlog.free(row)
            if monotonic() >= until:
                break
        outbox.flush()
        if stream is not None:
            one.is_held = stream.is_held
            stream.is_held |= bool(one.rows)
            stream.socket = outbox.descriptor()

    def _hand_left(self, one: OpenRequest, left: Sequence[Left]) -> None:
        """Hand out the rows of a request that could not be sent directly; rows that Python writes may have to wait."""
        outbox, stream, share, began = one.answer.outbox, one.listener.stream, one.share, monotonic()
        if share.turn != self._turn_began:
            share.turn, share.spent = self._turn_began, 0.0
        is_heavy = share.spent >= _SLICE_SECONDS and began - self._turn_began >= _LONGEST_TURN_SECONDS
        if left[-1].events is None and (share.requests or is_heavy):
            written = 0 if one.rows else next((n for n, row in enumerate(left) if row.events is None), len(left))
            self._wait(one, left[written:])
            left = left[:written]
        if len(left) > 1:
            outbox.gather()
        for row in left:
            if one.request_id not in self._opened:  # it has ended
                break
            self._hand(one, row)
        if len(left) > 1:
            outbox.flush()
        if stream is not None and stream.form is not None:
            stream.socket = outbox.descriptor()
        share.spent += monotonic() - began

    def _wait(self, one: OpenRequest, rows: Iterable[Left]) -> None:
        """Let rows of a request wait for its answer's turn: until then Python takes those behind them, too."""
        stream, share = one.listener.stream, one.share
        for row in (WaitingRow(left.view, left.place) for left in rows):
            if not one.rows:
                if stream is not None:
                    one.is_held, stream.is_held = stream.is_held, True
                if not share.requests:
                    self._waiting.add(share.who, share)
                share.requests.append(one)
            one.rows.append(row)
            self.backlog.hold(row)

    def _steps(self) -> list[RenderedStep]:
        """Take the steps that wait, up to a request's error, which is handed out alone.

        Several are handed out together: then a request's rows wait for those of the requests before it alone, and not
        for all of an earlier step.
        """
        steps: list[RenderedStep] = []
        while self.backlog and len(steps) < _MOST_GATHERED:
            if steps and self.backlog.begins_with_error:
                break
            output = self.backlog.popleft()
            if isinstance(output, RequestEnd):
                if output.error is not None:
                    self._fail_behind_rows(output.request_id, output.error)
                continue
            target, draft = output
            self.tokens += int(target.token_counts.sum())
            self._weights.note(target.header.weight_version, target.request_ids, target.positions, self._opened)
            rows = target if len(self._opened) >= target.row_count else selected(target, self._opened)
            if rows is not None:
                steps.append(RenderedStep(rows, self._vocabulary, draft, self._weights))
        return steps

    async def _end_long_turn(self) -> None:
        """After a long turn let other tasks run, the one that takes steps from the bus as often as it has some."""
        if not self._is_turn_over():
            return
        for _ in range(_MOST_TURNS):
            before = self._taken
            await asyncio.sleep(0)
            if self._taken == before:
                break
        self._turn_began = monotonic()

    def _is_turn_over(self) -> bool:
        return monotonic() - self._turn_began >= _LONGEST_TURN_SECONDS

    def _end_heaviest(self) -> None:
        """End the answers that hold the most, with what waits here for them, until half of that is gone."""
        self.backlog.keep(self._opened)
        if self.backlog.size <= self.most_backlog:  # most of it was of requests that have ended
            return
        beside: Counter[Answer] = Counter()
        for key, weight in self.backlog.weights().items():
            if key in self._opened:
                beside[self._opened[key].answer] += weight
        for one in self._opened.values():  # there may be very many rows: the first speaks for all of a request
            if one.rows and isinstance(one.rows[0], WaitingRow):
                step = one.rows[0].step
                beside[one.answer] += len(one.rows) * (step.size // step.batch.row_count)
        self._buffers.evict(sum(beside.values()) // 2, beside=beside)
        self.backlog.keep(self._opened)

    async def open(
        self,
        keys: Sequence[int],
        generates: Iterable[Generate],
        answer: Answer,
        caller: Caller,
        reserved: int = 0,
    ) -> None:
        """Send an answer's requests to the bus under their ids, all or none; an ApiError says why not.

        Other tasks run between some of them; if the answer ends meanwhile, the rest is not sent. The answer is charged
        from now on with `reserved` bytes: its request, and the scores of its prompts before any of them comes.
        """
        if self.is_draining:
            raise self._refusal(503, "the gateway is stopping", "stopping")
        if refusal := self._client.refusal:  # else they would wait for a processor that will not take them
            raise self._refusal(503, f"the processor refuses this gateway: {refusal}", "no_processor")
        caller.check_room(len(keys))
        self._check_room(len(keys), reserved)
        caller.open(keys)
        answer.outbox.reserve(reserved)
        self._unsent += len(keys)
        left = deque(keys)
        try:
            await self._open_all(left, generates, answer, caller)
        except (RequestFailedError, ContractError) as error:
            self.close(keys)
            if isinstance(error, RequestFailedError):
                raise of_request(error, self._settings.retry_after_ms) from None
            raise ApiError(400, str(error), code="invalid_value") from None
        finally:
            self._unsent -= len(left)
            for key in left:
                caller.closed(key)

    async def _open_all(self, left: deque[int], generates: Iterable[Generate], answer: Answer, caller: Caller) -> None:
        share, began = _Share(answer.who), monotonic()
        for generate, listener in zip(generates, answer.listeners, strict=True):
            if monotonic() - began >= _OPENING_SECONDS:
                await self._buffers.turns.next()
                began = monotonic()
            if answer.outbox.is_closed:
                return
            generate.request_id = left[0]
            self._open(generate, answer, listener, caller, share)
            left.popleft()
            self._unsent -= 1

    def _check_room(self, requests: int, reserved: int) -> None:
        most, opened = self._settings.max_requests, len(self)
        if requests > most:  # to wait would not help
            message = f"n: at most {most} choices (gateway.max_requests), got {requests}"
            raise ApiError(400, message, param="n", code="invalid_value")
        if opened + requests > most:
            message = f"open requests: at most {most}, got {opened} and {requests} more"
            raise self._refusal(429, message, "overloaded")
        held, room = self._buffers.reserved, self._buffers.most // _RESERVED_SHARE
        if reserved and held + reserved > room:
            message = f"long prompts that answers repeat, and prompts' scores: at most {room} bytes at once"
            raise self._refusal(429, f"{message} (gateway.buffer_bytes), got {held} and {reserved} more", "overloaded")

    def close(self, keys: Sequence[int]) -> None:
        """Forget requests, and abort those that have not ended."""
        for key in keys:
            if self._forget(key) is not None:
                self._client.abort(key)

    def revoke(self, caller: Caller) -> None:
        """End the open requests of an API key that was revoked."""
        for one in [each for each in self._opened.values() if each.caller is caller]:
            one.listener.end(ApiError(401, "the API key was revoked", code="invalid_api_key"))
            self.close([one.request_id])

    def give_up(self) -> None:
        """End what is still open: the gateway leaves."""
        for one in list(self._opened.values()):
            self._forget(one.request_id)
            self._client.abort(one.request_id)
            one.listener.end(ApiError(503, "the gateway stopped before the request had ended", code="stopping"))

    def _refusal(self, status: int, message: str, code: str) -> ApiError:
        self.refused += 1
        return ApiError(status, message, code=code, retry_after_ms=self._settings.retry_after_ms)

    def _open(self, generate: Generate, answer: Answer, listener: Listener, caller: Caller, share: _Share) -> None:
        generate.tokenizer_digest = self._vocabulary.digest
        request_id = self._client.submit(generate)
        self._callers[request_id] = caller
        self._opened[request_id] = OpenRequest(request_id, answer, listener, caller, share)
        self._writer.open(request_id, listener.stream)

    def _hand(self, one: OpenRequest, row: Left) -> None:
        view, place, events, is_rest = row
        outbox, wants_more = one.answer.outbox, True
        try:
            if events is None:
                wants_more = one.listener.take(view, place)
            elif is_rest and outbox.direct is not None:
                outbox.direct.send_rest(events)
            else:
                one.answer.put_events(events, view.produced_at_ns)
        except Exception:  # noqa: BLE001 - a defect in one answer must not end all others
            self._repeated_log.begin("row", _log.exception, "a row could not be written")
            one.listener.end(ApiError(500, "a defect of the gateway; its log says more", code="internal"))
            wants_more = False
        if view.statuses[place] in _ENDS:
            self._forget(one.request_id)
        elif not wants_more:  # a stop that only the gateway saw: the worker goes on until the request is aborted
            self._forget(one.request_id)
            self._client.abort(one.request_id)

    def _forget(self, request_id: int) -> OpenRequest | None:
        """Hand out no more rows of a request, and return it; None: it has ended before."""
        self._writer.close(request_id)
        self._weights.forget(request_id)
        one = self._opened.pop(request_id, None)
        if one is not None:
            for row in one.rows:
                if isinstance(row, WaitingRow):
                    self.backlog.free(row)
            one.rows.clear()
        return one

    def _fail_behind_rows(self, request_id: int, error: RequestFailedError) -> None:
        one = self._opened.get(request_id)
        if one is not None and one.rows:
            one.rows.append(error)
        else:
            self._fail(request_id, error)

    def _fail(self, request_id: int, error: RequestFailedError) -> None:
        one = self._forget(request_id)
        if one is None:
            return
        # Rows that were not handed out were not emitted: a client that resumes must not leave them out.
        error.emitted_tokens = min(error.emitted_tokens, one.listener.tokens)
        failure = of_request(error, self._settings.retry_after_ms)
        if failure.status in _SERVERS:
            values = {"request": request_id, "code": failure.code, "reason": failure.message}
            self._repeated_log.begin(("failed", failure.code), _log.warning, "request failed", **values)
        one.listener.end(failure)
