"""Routes: the HTTP handlers of all paths and of errors."""

import asyncio
import json
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

import orjson
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenbus.gateway.access import Access, owner_of, visitor_of
from tokenbus.gateway.answer import JSON, Answer, Format, WholeAnswer
from tokenbus.gateway.completion_request import BodyHeaders, CompletionRequest, unpacked
from tokenbus.gateway.control import ControlRoutes
from tokenbus.gateway.encoder_process import Job, Reply
from tokenbus.gateway.errors import MODEL_NOT_FOUND, ApiError
from tokenbus.gateway.fairness import SHORT_BYTES, AdmissionLimiter
from tokenbus.gateway.gateway import Gateway
from tokenbus.gateway.last_turns import TurnRecorder
from tokenbus.gateway.messages_format import MessagesFormat
from tokenbus.gateway.metrics import gateway_collector
from tokenbus.gateway.openai_format import Envelope, GenerateFormat
from tokenbus.gateway.openapi import document
from tokenbus.gateway.processor_status import bus_panel
from tokenbus.gateway.request_body import read_body
from tokenbus.gateway.response import NO_STORE, AnswerResponse, LongResponse, error_response, json_response
from tokenbus.gateway.responses_format import ResponsesFormat
from tokenbus.gateway.sse import InspectorFormat, StreamedAnswer
from tokenbus.gateway.validation import checked_session, invalid, parse_json
from tokenbus.logs import logger
from tokenbus.recordings.session_turns import SessionName

T = TypeVar("T")
_Handler = Callable[[Request], Awaitable[Response]]
_log = logger("gateway")
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_ANSWERS: Mapping[str, tuple[str, Callable[[CompletionRequest, int], Format]]] = {
    "/v1/completions": ("completion", Envelope),
    "/v1/chat/completions": ("chat", Envelope),
    "/v1/chat/completions/batch": ("chat_batch", Envelope),
    "/invocations": ("invocation", Envelope),
    "/v1/messages": ("messages", MessagesFormat),
    "/v1/responses": ("responses", ResponsesFormat),
    "/inference/v1/generate": ("generation", GenerateFormat),
    "/inspect": ("inspection", InspectorFormat),
}
"""Maps a path to the reader's method for the body, and to the format of the answer."""
_UNWATCHED_SECONDS = 0.05
"""Time, in seconds, after which the gateway begins to watch for a disconnect. Most texts are encoded sooner."""
_IDS = 2**64
_ADAPTER = b"x-amzn-sagemaker-adapter-identifier"
_MOST_NAME = 256
_OF_MODEL_BYTES = 2_048
"""Number of bytes that the tokenizer of any model encodes within about 2 ms."""
_ADMITTED_AT_ONCE = 4
"""Number of requests to begin per tick of the event loop. Beginning a request costs as much as writing 30 rows."""


class Routes:
    """Handles HTTP requests for one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._page = _Page(packages=[("tokenbus.gateway", "page")])
        self._document = orjson.dumps(document(gateway.reader.types))
        self._began = int(time.time())
        self._limiter = AdmissionLimiter(_ADMITTED_AT_ONCE)
        self._quick_bytes = _OF_MODEL_BYTES if gateway.vocabulary.is_of_model else SHORT_BYTES
        """Bodies up to this size are read in this process, which takes no longer than writing the rows of a step.

        `_may_take_long` finds short bodies that are exceptions.
        """

    def app(self) -> ASGIApp:
        tokens = {path: self._answering(kind, form) for path, (kind, form) in _ANSWERS.items()}
        routes = [
            *(Route(path, handler, methods=["POST"]) for path, handler in tokens.items()),
            Route("/v1/messages/count_tokens", self._encoding("token_count"), methods=["POST"]),
            Route("/v1/completions/render", self._encoding("completion_rendering"), methods=["POST"]),
            Route("/v1/chat/completions/render", self._encoding("chat_rendering"), methods=["POST"]),
            Route("/v1/messages/render", self._encoding("messages_rendering"), methods=["POST"]),
            Route("/v1/responses/render", self._encoding("responses_rendering"), methods=["POST"]),
            Route("/tokenize", self._encoding("tokenization"), methods=["POST"]),
            Route("/detokenize", self._encoding("detokenization"), methods=["POST"]),
            Route("/tokenizer_info", self._tokenizer_info),
            *ControlRoutes(self._gateway).routes(),
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._model),
            Route("/sessions/{session_id:path}", self._session),
            Route("/bus", self._bus),
            Route("/healthz", self._healthz),
            Route("/readyz", self._readyz),
            Route("/health", self._ping),
            Route("/ping", self._ping, methods=["GET", "POST"]),
            Route("/version", self._version),
            Route("/load", self._load),
            Route("/metrics", self._metrics),
            Route("/openapi.json", self._openapi),
            Route("/", self._index),
            Route("/page/{name}", self._index),
        ]
        handlers = {ApiError: _api_error, HTTPException: _no_such_route, Exception: self._defect}
        app = Starlette(
            routes=routes,
            middleware=[Middleware(_Direct, tokens)],
            exception_handlers=handlers,  # type: ignore[arg-type]  # each takes its own error
        )
        app.router.redirect_slashes = False
        self.access = Access(app, self._gateway, {route.path for route in routes}, set(tokens))
        return self.access

    def _answering(self, kind: str, form: Callable[[CompletionRequest, int], Format]) -> _Handler:
        async def handle(request: Request) -> Response:
            asked = await self._read(request, kind, unpacked)
            first = secrets.randbits(64) or 1
            # The first request's id on the bus is also the answer's id. The other requests have consecutive ids.
            request_ids = [(first + index) % _IDS or _IDS - 1 for index in range(asked.choices)]
            kept = asked.kept()
            answer = (StreamedAnswer if asked.is_streamed else WholeAnswer)(
                kept, form(kept, first), self._gateway.settings.gateway, self._gateway.buffers
            )
            if asked.bridging:
                self._gateway.counts.bridged_turns[asked.bridging] += 1
            if asked.conversation:
                gateway, tenant = self._gateway, visitor_of(request.scope).caller.tenant
                answer.recorder = TurnRecorder(gateway.turns, tenant, asked, gateway.vocabulary)
            return await self._begin(request, asked, answer, request_ids, kept.size)

        return handle

    async def _read(self, request: Request, kind: str, decode: Callable[[bytes], T]) -> T:
        """Return the result of the reader's method `kind` for a body. `decode` decodes an encoder's result."""
        gateway = self._gateway
        async with gateway.bodies.hold(owner_of(request.scope)) as held:
            data = await read_body(request, gateway.settings.gateway, held)
            if not gateway.reader.knows_models:  # a body without a model means the first model
                await gateway.learn_models()
            try:
                return await self._read_from(request, kind, data, decode)
            except ApiError as error:
                if error.code != MODEL_NOT_FOUND:
                    raise
            await gateway.learn_models(is_new=True)  # the model may be new
            return await self._read_from(request, kind, data, decode)

    async def _read_from(self, request: Request, kind: str, data: bytearray, decode: Callable[[bytes], T]) -> T:
        reader, encoders, headers = self._gateway.reader, self._gateway.encoders, _headers_of(request, kind)
        if len(data) <= self._quick_bytes:
            await self._limiter.next()
            began = time.monotonic()
            try:
                value = parse_json(data)
                if not self._may_take_long(value, headers):
                    reader.headers = headers
                    result: T = getattr(reader, kind)(value)
                    self._gateway.note_ignored(reader.types.ignored)
                    return result
            finally:
                self._limiter.spent(time.monotonic() - began)
        job = Job(kind, reader.models, reader.parents, headers)
        find = partial(self._gateway.turns.find, visitor_of(request.scope).caller.tenant)
        reply = await self._while_connected(request, encoders.read(job, data, owner_of(request.scope), find))
        self._gateway.note_ignored(reply.ignored)
        await self._limiter.next()
        return decode(reply.data)

    def _may_take_long(self, value: object, headers: BodyHeaders) -> bool:
        """Return whether even a short body may take long, because a template may loop over the body's variables.

        The last turn of a session may be long, too.
        """
        given = value if isinstance(value, dict) else {}
        if self._gateway.reader.bridge is not None and (headers.session or given.get("session_id")):
            return True
        return self._gateway.vocabulary.is_of_model and "chat_template_kwargs" in given

    async def _while_connected(self, request: Request, work: Coroutine[Any, Any, Reply]) -> Reply:
        working = asyncio.create_task(work)
        watching: set[asyncio.Future[Any]] = {working}
        try:
            await asyncio.wait(watching, timeout=_UNWATCHED_SECONDS)
            if not working.done():
                watching.add(asyncio.ensure_future(request.receive()))
                await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            self._gateway.counts.left_clients += 1
            raise ApiError(400, "body: not encoded, as the client closed the connection", code="client_left")
        finally:
            for each in watching:
                each.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    async def _begin(
        self, request: Request, asked: CompletionRequest, answer: Answer, request_ids: list[int], kept_bytes: int
    ) -> Response:
        dispatcher, named = self._gateway.dispatcher, self._gateway.named
        caller, recorder = visitor_of(request.scope).caller, answer.recorder

        def close() -> None:
            dispatcher.close(request_ids)
            if recorder is not None:  # `answer.recorder` would make the answer refer to itself
                recorder.close()
            if named.get(asked.name) is request_ids:
                del named[asked.name]

        if asked.name:
            named[asked.name] = request_ids
        answer.who = owner_of(request.scope)
        answer.begin(close)
        try:
            # The limit on connections bounds the memory of short bodies.
            reserved = asked.scored_bytes + (kept_bytes if kept_bytes > SHORT_BYTES else 0)
            await dispatcher.open(request_ids, asked.generates(caller.tenant), answer, caller, reserved)
        except BaseException as error:
            close()
            answer.queue.drop()
            if isinstance(error, ApiError):
                self.access.limited(request.scope, error, caller)
            raise
        return AnswerResponse(answer, f"{request_ids[0]:016x}", close, self._gateway)

    def _encoding(self, kind: str) -> _Handler:
        async def handle(request: Request) -> Response:
            return LongResponse(await self._read(request, kind, bytes), owner_of(request.scope), self._gateway)

        return handle

    async def _models(self, _request: Request) -> Response:
        await self._gateway.learn_models()
        return json_response(
            {"object": "list", "data": [self._model_of(model) for model in self._gateway.reader.models]}
        )

    async def _model(self, request: Request) -> Response:
        model = request.path_params["model"]
        await self._gateway.learn_models(is_new=model not in self._gateway.reader.models)
        if model not in self._gateway.reader.models:
            raise ApiError(404, f"there is no model {model!r}", param="model", code=MODEL_NOT_FOUND)
        return json_response(self._model_of(model))

    def _model_of(self, model: str) -> dict[str, object]:
        reader = self._gateway.reader
        most, parent = reader.models.get(model, 0) or None, reader.parents.get(model)
        root = self._gateway.adapter_folders.get(model, model) if parent else model
        facts: dict[str, object] = {"root": root, "parent": parent, "max_model_len": most, "permission": []}
        return {"id": model, "object": "model", "created": self._began, "owned_by": "tokenbus", **facts}

    async def _tokenizer_info(self, _request: Request) -> Response:
        text = json.dumps(self._gateway.vocabulary.config)  # orjson refuses a model_max_length above 64 bits
        return Response(text, headers=NO_STORE, media_type=JSON)

    async def _session(self, request: Request) -> Response:
        gateway, visitor = self._gateway, visitor_of(request.scope)
        name = SessionName(gateway.client.owner, visitor.caller.tenant, request.path_params["session_id"])
        return LongResponse(await gateway.sessions.read(name), owner_of(request.scope), gateway)

    async def _bus(self, _request: Request) -> Response:
        try:
            return json_response(bus_panel(await self._gateway.status.get(), time.time()))
        except TimeoutError as error:
            return json_response({"error": str(error)}, 503)

    async def _healthz(self, request: Request) -> Response:
        health = self._gateway.health()
        status = 503 if health.problems else 200
        if not visitor_of(request.scope).is_known:
            return json_response({"status": "failing" if health.problems else "ok"}, status)
        return Response(health.body, status, NO_STORE, JSON)

    async def _ping(self, _request: Request) -> Response:
        return Response(status_code=503 if await self._gateway.why_not_ready() else 200, headers=NO_STORE)

    async def _version(self, _request: Request) -> Response:
        return json_response({"version": version("tokenbus")})

    async def _load(self, _request: Request) -> Response:
        return json_response({"server_load": len(self._gateway.dispatcher)})

    async def _readyz(self, request: Request) -> Response:
        problems = await self._gateway.why_not_ready()
        pauses = await self._gateway.pauses() if not problems else []
        status: dict[str, object] = {"status": "not ready" if problems else "paused" if pauses else "ready"}
        if visitor_of(request.scope).is_known:
            status |= {"problems": problems, "paused": pauses}
        return json_response(status, 503 if problems else 200)

    async def _metrics(self, _request: Request) -> Response:
        page = generate_latest(gateway_collector(self._gateway))
        return Response(page, headers=NO_STORE | {"content-type": CONTENT_TYPE_LATEST})

    async def _openapi(self, _request: Request) -> Response:
        return Response(self._document, media_type=JSON)

    async def _index(self, request: Request) -> Response:
        return await self._page.get_response(request.path_params.get("name", "index.html"), request.scope)

    async def _defect(self, request: Request, _error: Exception) -> Response:
        self._gateway.repeated_log.begin("defect", _log.exception, "a request failed", path=request.url.path)
        error = ApiError(500, "a defect of the gateway; its log says more", code="internal")
        return error_response(error, request.url.path)


class _Page(StaticFiles):
    """The files of the inspector's page. The page loads nothing from other sites, and browsers may cache it."""

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(_PAGE_HEADERS)
        return response


class _Direct:
    """Middleware that calls the handlers of some routes directly, which saves a tenth of a short request's time."""

    def __init__(self, app: ASGIApp, handlers: Mapping[str, _Handler]) -> None:
        self._app = app
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await handler(request)
        except ApiError as error:
            response = error_response(error, scope["path"])
        await response(scope, receive, send)


def _headers_of(request: Request, kind: str) -> BodyHeaders:
    given = dict(reversed(request.scope["headers"]))  # if a header is repeated, use the first
    name = given.get(b"x-request-id", b"").decode("latin-1")
    if len(name) > _MOST_NAME:
        raise invalid("x-request-id", f"at most {_MOST_NAME} characters, got {len(name)}")
    adapter = given.get(_ADAPTER, b"").decode("latin-1") if kind == "invocation" else ""
    session = given.get(b"x-session-id")
    if not session:
        return BodyHeaders(name, adapter)
    return BodyHeaders(name, adapter, checked_session("x-session-id", session.decode("utf-8", "surrogateescape")))


async def _api_error(request: Request, error: ApiError) -> Response:
    return error_response(error, request.url.path)


async def _no_such_route(request: Request, error: HTTPException) -> Response:
    what = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:  # noqa: PLR2004 - a status speaks for itself
        made = error_response(ApiError(405, f"{what}: another method", code="method_not_allowed"), request.url.path)
        made.headers.update(error.headers or {})
        return made
    return error_response(ApiError(error.status_code, f"{what}: no such route", code="not_found"), request.url.path)
