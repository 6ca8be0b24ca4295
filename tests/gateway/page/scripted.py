"""A gateway that sends what a test scripts, event by event, so that the test knows what the page has received."""

import asyncio
import contextlib
import json
import queue
import socket
import threading
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from tests.support.waiting import MOST

PAGE = Path(str(files("tokenbus.gateway") / "page"))
_SAFE = {"Content-Security-Policy": "default-src 'self'"}


class Stream:
    def __init__(self, body: dict[str, Any], loop: asyncio.AbstractEventLoop) -> None:
        self.body = body
        self.parts: asyncio.Queue[bytes] = asyncio.Queue()
        self._loop = loop
        self._closed = threading.Event()

    def send(self, event: str, data: Mapping[str, Any]) -> None:
        self.write(f"event: {event}\ndata: {json.dumps(data)}\n\n".encode())

    def write(self, part: bytes) -> None:
        """Send any bytes; none of them ends the answer."""
        self._loop.call_soon_threadsafe(self.parts.put_nowait, part)

    def finish(self) -> None:
        self.write(b"")

    def close(self) -> None:
        self._closed.set()

    def wait_until_closed(self) -> bool:
        return self._closed.wait(MOST)


class ScriptedGateway:
    """Serves the page's own files; what the page asks for, the test answers."""

    def __init__(self) -> None:
        self.reset()
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        routes = [
            Route("/", lambda _: FileResponse(PAGE / "index.html", headers=_SAFE)),
            Route("/bus", lambda _: JSONResponse(self.bus, self.bus_status)),
            Route("/inspect", _Inspect(self), methods=["POST"]),
            Mount("/page", StaticFiles(directory=PAGE)),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), lifespan="off", ws="none", log_config=None, timeout_graceful_shutdown=int(MOST)
        )
        self._server = uvicorn.Server(config)

    def reset(self) -> None:
        self.bus: dict[str, Any] = {"workers": [], "processor": {}, "clients": 0, "at": 0}
        self.bus_status = 200
        self.refusal: Response | None = None
        self._streams: queue.Queue[Stream] = queue.Queue()

    @contextlib.contextmanager
    def running(self) -> Iterator["ScriptedGateway"]:
        thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        thread.start()
        try:
            yield self
        finally:
            self._server.should_exit = True
            thread.join()
            self._socket.close()

    def refuse(self, status: int, message: str, *, headers: Mapping[str, str] | None = None, **fields: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None, **fields}
        self.refusal = JSONResponse({"error": error}, status, headers)

    def next_stream(self) -> Stream:
        return self._streams.get(timeout=MOST)

    def opened(self, stream: Stream) -> None:
        self._streams.put(stream)


class _Inspect:
    """The endpoint, plain ASGI: it must see the page go while it waits for the test."""

    def __init__(self, gateway: ScriptedGateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).json()
        if self._gateway.refusal is not None:
            await self._gateway.refusal(scope, receive, send)
            return
        stream = Stream(body, asyncio.get_running_loop())
        self._gateway.opened(stream)
        kind = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        gone = asyncio.ensure_future(receive())
        try:
            await _answer(stream, gone, send)
        finally:
            gone.cancel()
            stream.close()


async def _answer(stream: Stream, gone: "asyncio.Future[Any]", send: Send) -> None:
    while True:
        part = asyncio.ensure_future(stream.parts.get())
        await asyncio.wait([part, gone], return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            part.cancel()
            return
        is_last = part.result() == b""
        await send({"type": "http.response.body", "body": part.result(), "more_body": not is_last})
        if is_last:
            return
