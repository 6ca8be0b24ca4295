"""The routes: what each path answers, and how what goes wrong is told."""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenbus_services.gateway.access import Access, visitor_of
from tokenbus_services.gateway.answer import JSON, Answer, StreamedAnswer, WholeAnswer
from tokenbus_services.gateway.completion_request import CompletionRequest
from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.gateway.inspection import InspectedAnswer
from tokenbus_services.gateway.metrics import Counts
from tokenbus_services.gateway.openai_format import Envelope
from tokenbus_services.gateway.openapi import document
from tokenbus_services.gateway.page import Page
from tokenbus_services.gateway.processor_metrics import UnknownBusError
from tokenbus_services.gateway.request_body import parse_json, read_body
from tokenbus_services.gateway.response import RAW_SEND, AnswerResponse, error_response
from tokenbus_services.gateway.state import Gateway
from tokenbus_services.logs import DeduplicatedLog, logger

_log = logger("gateway")
_NO_STORE = {"cache-control": "no-store"}
_OTHER = "other"
_KEYS = 2**64
_READ_AT_ONCE = 16_384
"""Bytes of a body; to make tokens of a longer one takes long, and streams are not to wait for that."""
_BEGIN_AT_ONCE = 4
"""Requests; what it takes to begin one is about what it takes to write 30 rows."""


class Routes:
    """Answers requests over HTTP with what one gateway has."""

    def __init__(self, gateway: Gateway) -> None:
        """Take the gateway."""
        self._gateway = gateway
        self._page = Page()
        self._document = orjson.dumps(document(gateway.reader.types))
        self._began = int(time.time())
        self._repeated_log = DeduplicatedLog()
        self._limiter = AdmissionLimiter(_BEGIN_AT_ONCE)
        self._reading = asyncio.Lock()

    def app(self) -> ASGIApp:
        """Return the application."""
        routes = [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/inspect", self._inspect, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._model),
            Route("/bus", self._bus),
            Route("/healthz", self._healthz),
            Route("/readyz", self._readyz),
            Route("/metrics", self._metrics),
            Route("/openapi.json", self._openapi),
            Route("/", self._index),
            Route("/page/{name}", self._index),
        ]
        handlers = {ApiError: _told, HTTPException: _no_such_route, Exception: self._defect}
        app = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]  # each takes its own error
        app.router.redirect_slashes = False
        gateway = self._gateway
        self.access = Access(app, gateway.settings.gateway, gateway.callers, gateway.counts)
        return _Counted(self.access, gateway.counts, {route.path for route in routes})

    # Tokens.

    async def _completions(self, request: Request) -> Response:
        return self._answer(request, await self._read(request, self._gateway.reader.completion))

    async def _chat(self, request: Request) -> Response:
        return self._answer(request, await self._read(request, self._gateway.reader.chat))

    async def _inspect(self, request: Request) -> Response:
        gateway = self._gateway
        asked = await self._read(request, gateway.reader.inspection)
        key = _drawn()
        return self._begun(
            request, asked, InspectedAnswer(asked, key, gateway.settings.gateway, gateway.buffers), [key]
        )

    async def _read(self, request: Request, read: Callable[[Any], CompletionRequest]) -> CompletionRequest:
        data = await read_body(request, self._gateway.settings.gateway)
        await self._limiter.next()
        if len(data) <= _READ_AT_ONCE:
            return read(parse_json(data))
        async with self._reading:  # one at a time: several would take the interpreter from the streams
            return await asyncio.to_thread(lambda: read(parse_json(data)))

    def _answer(self, request: Request, asked: CompletionRequest) -> Response:
        settings = self._gateway.settings.gateway
        maker = StreamedAnswer if asked.is_streamed else WholeAnswer
        first = _drawn()
        # The answer's id names its requests on the bus: the first one's key, and those after it.
        keys = [(first + index) % _KEYS or _KEYS - 1 for index in range(asked.choices)]
        return self._begun(request, asked, maker(asked, Envelope(asked, first), settings, self._gateway.buffers), keys)

    def _begun(self, request: Request, asked: CompletionRequest, answer: Answer, keys: list[int]) -> Response:
        feed = self._gateway.feed
        generates = []
        for index, key in enumerate(keys):
            generate = asked.generate(index)
            generate.request_key = key
            generates.append(generate)
        caller = visitor_of(request.scope).caller
        try:
            feed.open(generates, answer, caller)
        except ApiError as error:
            self.access.limited(request.scope, error, caller)
            raise

        def close() -> None:
            """End what is still open of it."""
            feed.close(keys)

        answer.begin(close)
        return AnswerResponse(answer, f"{keys[0]:016x}", close, self._gateway)

    # Facts.

    async def _models(self, _request: Request) -> Response:
        return _json({"object": "list", "data": [self._told_of(model) for model in self._gateway.reader.models]})

    async def _model(self, request: Request) -> Response:
        model = request.path_params["model"]
        if model not in self._gateway.reader.models:
            raise ApiError(404, f"there is no model {model!r}", param="model", code="model_not_found")
        return _json(self._told_of(model))

    def _told_of(self, model: str) -> dict[str, object]:
        return {"id": model, "object": "model", "created": self._began, "owned_by": "tokenbus"}

    async def _bus(self, _request: Request) -> Response:
        try:
            return _json(await self._gateway.processor.bus())
        except UnknownBusError as error:
            return _json({"error": str(error)}, 503)

    async def _healthz(self, request: Request) -> Response:
        health = self._gateway.health()
        status = 503 if health.problems else 200
        if not visitor_of(request.scope).is_known:
            return _json({"status": "failing" if health.problems else "ok"}, status)
        return Response(health.body, status, _NO_STORE, JSON)

    async def _readyz(self, request: Request) -> Response:
        problems = await self._gateway.why_not_ready()
        status: dict[str, object] = {"status": "not ready" if problems else "ready"}
        if visitor_of(request.scope).is_known:
            status["problems"] = problems
        return _json(status, 503 if problems else 200)

    async def _metrics(self, _request: Request) -> Response:
        page = generate_latest(self._gateway.collector)
        return Response(page, headers=_NO_STORE | {"content-type": CONTENT_TYPE_LATEST})

    async def _openapi(self, _request: Request) -> Response:
        return Response(self._document, media_type=JSON)

    async def _index(self, request: Request) -> Response:
        return self._page.answer(request)

    async def _defect(self, request: Request, _error: Exception) -> Response:
        self._repeated_log.begin("defect", _log.exception, "a request failed", path=request.url.path)
        return error_response(ApiError(500, "a defect of the gateway; its log says more", code="internal"))


class AdmissionLimiter:
    """So many turns for each time that the event loop has looked at its sockets; who comes first has the first."""

    def __init__(self, at_once: int) -> None:
        """Take how many there are at a time."""
        self._at_once = at_once
        self._left = at_once
        self._is_counting = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def next(self) -> None:
        """Wait for a turn."""
        loop = asyncio.get_running_loop()
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._refill)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _refill(self) -> None:
        self._left = self._at_once
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else who waited has gone
                turn.set_result(None)
                self._left -= 1
        self._is_counting = bool(self._waiting) or self._left < self._at_once
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._refill)


class _Counted:
    """Counts answers by route and status."""

    def __init__(self, app: ASGIApp, counts: Counts, paths: set[str]) -> None:
        self._app = app
        self._counts = counts
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer, and look at the first message alone."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        # Few values, whatever is asked for.
        route = path if path in self._paths else "/page" if path.startswith("/page/") else _OTHER

        async def counting(message: Message) -> None:
            """Count the status."""
            if message["type"] == "http.response.start":
                self._counts.requests[route, str(message["status"])] += 1
            await send(message)

        # Answers of many rows are sent past the application's layers, of which none looks at them.
        scope.setdefault("extensions", {})[RAW_SEND] = send
        await self._app(scope, receive, counting)


Handler = Callable[[Request, Exception], Awaitable[Response]]


async def _told(_request: Request, error: ApiError) -> Response:
    return error_response(error)


async def _no_such_route(request: Request, error: HTTPException) -> Response:
    what = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:  # noqa: PLR2004 - a status speaks for itself
        made = error_response(ApiError(405, f"{what}: another method", code="method_not_allowed"))
        made.headers.update(error.headers or {})
        return made
    return error_response(ApiError(error.status_code, f"{what}: no such route", code="not_found"))


def _json(content: object, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, _NO_STORE, JSON)


def _drawn() -> int:
    return secrets.randbits(64) or 1
