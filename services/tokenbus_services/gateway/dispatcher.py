"""Feed: hands each row that the client gets to the answer it belongs to, and says how requests end."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from tokenbus_contracts import ContractError, LogprobBatch
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_services.client import Client, RequestFailedError, RequestTokens
from tokenbus_services.delivery.step import FINISHED
from tokenbus_services.gateway.api_keys import Caller
from tokenbus_services.gateway.buffers import Backlog, Buffers, Holder, selected
from tokenbus_services.gateway.errors import ApiError, of_request
from tokenbus_services.gateway.rendered_step import RenderedStep
from tokenbus_services.gateway.vocabulary import Vocabulary
from tokenbus_services.logs import DeduplicatedLog, logger
from tokenbus_services.settings import GatewaySettings

_log = logger("gateway")
_ENDS = frozenset(map(int, FINISHED))
_SERVERS = range(500, 600)
"""Statuses of what is nobody's fault outside."""
_ROWS_AT_ONCE = 32
"""How often it is looked whether others must have their turn."""
_LONGEST_TURN_SECONDS = 0.01
"""After so long they have it. A step's rows are best written without a break: whoever gets in between delays them."""
_MOST_BEHIND = 64
"""Steps that may wait to be handed out before clients that do not read make way for those that do."""
_MOST_TURNS = 64
"""How many steps are taken at most before rows are handed out again."""
_UNREAD_SHARE = 16
"""This part of what may wait for a client says that it does not read."""
_BACKLOG_SHARE = 8
"""This part of what may wait for all clients may wait beside it to be handed out."""
_LAST_ROWS_SECONDS = 1.0
"""How long an error waits for rows that it counts and that have not come."""


class Listener(Protocol):
    """Who takes one request's rows."""

    @property
    def tokens(self) -> int:
        """How many of its tokens have come."""

    def take(self, view: RenderedStep, place: int) -> bool:
        """Take a row of a step; tell whether more are wanted."""

    def fail(self, error: ApiError) -> None:
        """Take the error that ends it."""


class Requests(Holder, Protocol):
    """An answer's requests."""

    @property
    def listeners(self) -> Sequence[Listener]:
        """Who takes the rows of each of its requests."""


class Opened:
    """One request that has not ended: who listens, and how it ends if that is not a row."""

    __slots__ = ("answer", "caller", "error", "key", "listener", "timer", "tokens", "watching")

    def __init__(self, key: int, answer: "Requests", listener: Listener, tokens: RequestTokens, caller: Caller) -> None:
        """Take the key, the answer that it is for, what takes its rows, what says how it ends, and who asked."""
        self.caller = caller
        self.answer = answer
        self.key = key
        self.listener = listener
        self.tokens = tokens
        self.watching: asyncio.Task[None] | None = None
        self.error: RequestFailedError | None = None
        self.timer: asyncio.TimerHandle | None = None


class Feed:
    """The one consumer of a client's outputs."""

    def __init__(self, client: Client, vocabulary: Vocabulary, settings: GatewaySettings, buffers: Buffers) -> None:
        """Take the client, what its tokens are, the bounds, and the sum of what waits for all clients."""
        self._client = client
        self._vocabulary = vocabulary
        self._settings = settings
        self._buffers = buffers
        self._opened: dict[int, Opened] = {}
        self.backlog = Backlog()
        self.most_backlog = max(1, buffers.most // _BACKLOG_SHARE)
        self._came = asyncio.Event()
        self._taken = 0
        """How many steps came."""
        self._repeated_log = DeduplicatedLog()
        self.is_draining = False
        """Whether nothing more is opened."""
        self.opened = 0
        self.tokens = 0
        self.peak = 0
        self.refused = 0
        self.aborted = 0
        """How many requests nobody waited for any more."""

    def __len__(self) -> int:
        """Return how many requests are open, those included that the bus has not ended yet."""
        return max(len(self._opened), self._client.session.outstanding)

    async def run(self) -> None:
        """Take what the bus brings as it comes, and hand out rows, until cancelled.

        What is not taken is not confirmed, and what is not confirmed piles up at the processor until it ends every
        request of this gateway. So all of it is taken, and what piles up here is charged to whose it is.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hand_out())
            async for target, draft in self._client.outputs():
                self._take(target, draft)

    def _take(self, target: LogprobBatch, draft: LogprobBatch | None) -> None:
        self.backlog.append(target, draft)
        self._came.set()
        self._taken += 1
        if len(self.backlog) > _MOST_BEHIND:  # what is written for clients that do not read delays those that do
            least = self._settings.stream_buffer_bytes // _UNREAD_SHARE
            self._buffers.evict(least, at_least=least, most=1)
        if self.backlog.size > self.most_backlog:
            self._end_heaviest()

    async def _hand_out(self) -> None:
        opened, began = self._opened, time.monotonic()
        while True:
            while not self.backlog:
                self._came.clear()
                await self._came.wait()
                began = time.monotonic()
            target, draft = self.backlog.popleft()
            self.tokens += int(target.token_counts.sum())
            rows = target if len(opened) >= target.row_count else selected(target, opened)
            if rows is None:
                continue
            view = RenderedStep(rows, self._vocabulary, draft)
            for place, key in enumerate(rows.request_keys.tolist()):
                one = opened.get(key)
                if one is not None:
                    self._hand(one, view, place)
                if place % _ROWS_AT_ONCE == 0 and time.monotonic() - began > _LONGEST_TURN_SECONDS:
                    await self._let_others_go_on()
                    began = time.monotonic()

    async def _let_others_go_on(self) -> None:
        """Let other tasks have their turn, the one that takes what the bus brings as many as it has use for."""
        for _ in range(_MOST_TURNS):
            before = self._taken
            await asyncio.sleep(0)
            if self._taken == before:
                return

    def _end_heaviest(self) -> None:
        """End the answers that hold the most, with what waits here for them, until half of that is gone."""
        beside: Counter[Holder] = Counter()
        for key, weight in self.backlog.weights().items():
            if key in self._opened:
                beside[self._opened[key].answer] += weight
        self._buffers.evict(self.backlog.size // 2, beside=beside)
        self.backlog.keep(self._opened)

    def open(self, generates: Sequence[Generate], answer: Requests, caller: Caller) -> list[int]:
        """Ask the bus for requests, all or none, and return their keys."""
        most = self._settings.max_requests
        if self.is_draining:
            raise self._refusal(503, "the gateway is stopping", "stopping")
        refusal = self._client.session.refusal
        if refusal is not None:  # else they would wait for a processor that answers, and how
            raise self._refusal(503, f"the processor refuses this gateway: {refusal.message}", "no_processor")
        caller.check_room(len(generates))
        if len(generates) > most:  # to wait would not help
            message = f"n: at most {most} choices (gateway.max_requests), got {len(generates)}"
            raise ApiError(400, message, param="n", code="invalid_value")
        if len(self) + len(generates) > most:
            message = f"open requests: at most {most}, got {len(self)} and {len(generates)} more"
            raise self._refusal(429, message, "overloaded")
        keys: list[int] = []
        try:
            for generate, listener in zip(generates, answer.listeners, strict=True):
                keys.append(self._open(generate, answer, listener, caller))
        except RequestFailedError as error:
            self.close(keys)
            raise of_request(error, self._settings.retry_after_ms) from None
        except ContractError as error:
            self.close(keys)
            raise ApiError(400, str(error), code="invalid_value") from None
        self.peak = max(self.peak, len(self))
        return keys

    def close(self, keys: Sequence[int]) -> None:
        """Forget requests, and abort those that have not ended."""
        for key in keys:
            one = self._opened.pop(key, None)
            if one is not None:
                self.aborted += 1
                self._forget(one)
                self._client.abort(key)

    def revoke(self, caller: Caller) -> None:
        """End what a key has open that was revoked."""
        for one in [each for each in self._opened.values() if each.caller is caller]:
            one.listener.fail(ApiError(401, "the API key was revoked", code="invalid_api_key"))
            self.close([one.key])

    def give_up(self) -> None:
        """End what is still open: the gateway leaves."""
        for one in list(self._opened.values()):
            self._opened.pop(one.key, None)
            self._forget(one)
            self._client.abort(one.key)
            one.listener.fail(ApiError(503, "the gateway stopped before the request had ended", code="stopping"))

    def _refusal(self, status: int, message: str, code: str) -> ApiError:
        self.refused += 1
        return ApiError(status, message, code=code, retry_after_ms=self._settings.retry_after_ms)

    def _open(self, generate: Generate, answer: Requests, listener: Listener, caller: Caller) -> int:
        tokens = self._client.generate(generate)
        caller.opened(tokens.key, tokens)
        one = Opened(tokens.key, answer, listener, tokens, caller)
        self._opened[tokens.key] = one
        one.watching = asyncio.create_task(self._watch(one))
        self.opened += 1
        return tokens.key

    def _hand(self, one: Opened, view: RenderedStep, place: int) -> None:
        try:
            wants_more = one.listener.take(view, place)
        except Exception:  # noqa: BLE001 - a defect in one answer must not end all others
            self._repeated_log.begin("row", _log.exception, "a row could not be written")
            one.listener.fail(ApiError(500, "a defect of the gateway; its log says more", code="internal"))
            wants_more = False
        if view.statuses[place] in _ENDS:
            self._opened.pop(one.key, None)
            self._forget(one)
        elif not wants_more:  # a stop that only the gateway saw: the worker goes on until it is told
            self._opened.pop(one.key, None)
            self._forget(one)
            self._client.abort(one.key)
        elif one.error is not None and one.listener.tokens >= one.error.emitted_tokens:
            self._fail(one)

    async def _watch(self, one: Opened) -> None:
        """Wait for an end that is no row."""
        try:
            async for _ in one.tokens.rows():
                pass  # rows come by `outputs`
        except RequestFailedError as error:
            one.error = error
            if one.listener.tokens >= error.emitted_tokens:
                self._fail(one)
            else:  # rows that came before it are still being handed out
                loop = asyncio.get_running_loop()
                one.timer = loop.call_later(_LAST_ROWS_SECONDS, self._fail, one)

    def _fail(self, one: Opened) -> None:
        if one.error is not None and self._opened.pop(one.key, None) is not None:
            self._forget(one)
            # Rows that came too late to be handed out were not emitted to anybody: who goes on must not leave them out.
            one.error.emitted_tokens = min(one.error.emitted_tokens, one.listener.tokens)
            told = of_request(one.error, self._settings.retry_after_ms)
            if told.status in _SERVERS:
                values = {"request": one.key, "code": told.code, "reason": told.message}
                self._repeated_log.begin(("failed", told.code), _log.warning, "request failed", **values)
            one.listener.fail(told)

    def look(self) -> None:
        """Sum up in the log what has been quiet for long enough; it is to be called now and then."""
        self._repeated_log.expire()

    @staticmethod
    def _forget(one: Opened) -> None:
        if one.timer is not None:
            one.timer.cancel()
        if one.watching is not None and not one.watching.done() and one.watching is not asyncio.current_task():
            one.watching.cancel()
