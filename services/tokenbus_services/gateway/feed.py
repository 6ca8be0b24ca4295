"""Feed: hands each row that the client gets to the answer it belongs to, and says how requests end."""

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_services.client import RequestFailedError, RequestTokens, TokenClient
from tokenbus_services.delivery.tokens import FINISHED
from tokenbus_services.gateway.errors import ApiError, of_request
from tokenbus_services.gateway.view import StepView
from tokenbus_services.gateway.vocabulary import Vocabulary
from tokenbus_services.logs import Episodes, logger
from tokenbus_services.settings import GatewaySettings

_log = logger("gateway")
_ENDS = frozenset(map(int, FINISHED))
_SERVERS = range(500, 600)
"""Statuses of what is nobody's fault outside."""
_ROWS_AT_ONCE = 32
"""How often it is looked whether others must have their turn."""
_LONGEST_TURN_SECONDS = 0.01
"""After so long they have it. A step's rows are best written without a break: whoever gets in between delays them."""
_LAST_ROWS_SECONDS = 1.0
"""How long an error waits for rows that it counts and that have not come."""


class Listener(Protocol):
    """Who takes one request's rows."""

    @property
    def tokens(self) -> int:
        """How many of its tokens have come."""

    def take(self, view: StepView, place: int) -> bool:
        """Take a row of a step; tell whether more are wanted."""

    def fail(self, error: ApiError) -> None:
        """Take the error that ends it."""


class Opened:
    """One request that has not ended: who listens, and how it ends if that is not a row."""

    __slots__ = ("error", "key", "listener", "timer", "tokens", "watching")

    def __init__(self, key: int, listener: Listener, tokens: RequestTokens) -> None:
        """Take the key, who listens, and who knows the end."""
        self.key = key
        self.listener = listener
        self.tokens = tokens
        self.watching: asyncio.Task[None] | None = None
        self.error: RequestFailedError | None = None
        self.timer: asyncio.TimerHandle | None = None


class Feed:
    """The one consumer of a client's outputs."""

    def __init__(self, client: TokenClient, vocabulary: Vocabulary, settings: GatewaySettings) -> None:
        """Take the client, what its tokens are, and the bounds."""
        self._client = client
        self._vocabulary = vocabulary
        self._settings = settings
        self._opened: dict[int, Opened] = {}
        self._episodes = Episodes()
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
        """Hand out rows until cancelled."""
        async for target, draft in self._client.outputs():
            view = StepView(target, self._vocabulary, draft)
            self.tokens += view.begins[-1]
            opened = self._opened
            began = time.monotonic()
            for place, key in enumerate(target.request_keys.tolist()):
                one = opened.get(key)
                if one is not None:
                    self._hand(one, view, place)
                if place % _ROWS_AT_ONCE == 0 and time.monotonic() - began > _LONGEST_TURN_SECONDS:
                    await asyncio.sleep(0)
                    began = time.monotonic()

    def open(self, generates: Sequence[Generate], listeners: Sequence[Listener]) -> list[int]:
        """Ask the bus for requests, all or none, and return their keys."""
        most = self._settings.max_requests
        if self.is_draining:
            raise self._refusal(503, "the gateway is stopping", "stopping")
        refusal = self._client.session.refusal
        if refusal is not None:  # else they would wait for a processor that answers, and how
            raise self._refusal(503, f"the processor refuses this gateway: {refusal.message}", "no_processor")
        if len(generates) > most:  # to wait would not help
            message = f"n: at most {most} choices (gateway.max_requests), got {len(generates)}"
            raise ApiError(400, message, param="n", code="invalid_value")
        if len(self) + len(generates) > most:
            message = f"open requests: at most {most}, got {len(self)} and {len(generates)} more"
            raise self._refusal(429, message, "overloaded")
        keys: list[int] = []
        try:
            for generate, listener in zip(generates, listeners, strict=True):
                keys.append(self._open(generate, listener))
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

    def _open(self, generate: Generate, listener: Listener) -> int:
        tokens = self._client.generate(generate)
        one = Opened(tokens.key, listener, tokens)
        self._opened[tokens.key] = one
        one.watching = asyncio.create_task(self._watch(one))
        self.opened += 1
        return tokens.key

    def _hand(self, one: Opened, view: StepView, place: int) -> None:
        try:
            wants_more = one.listener.take(view, place)
        except Exception:  # noqa: BLE001 - a defect in one answer must not end all others
            self._episodes.begin("row", _log.exception, "a row could not be written")
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
                self._episodes.begin(("failed", told.code), _log.warning, "request failed", **values)
            one.listener.fail(told)

    def look(self) -> None:
        """Sum up in the log what has been quiet for long enough; it is to be called now and then."""
        self._episodes.expire()

    @staticmethod
    def _forget(one: Opened) -> None:
        if one.timer is not None:
            one.timer.cancel()
        if one.watching is not None and not one.watching.done() and one.watching is not asyncio.current_task():
            one.watching.cancel()
