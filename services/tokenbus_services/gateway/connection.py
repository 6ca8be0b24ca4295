"""Connection: uvicorn's HTTP over httptools, with the bounds that it lacks: header bytes, and times to arrive."""

import asyncio
from collections.abc import Callable, Mapping
from time import time_ns
from typing import Any

from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from tokenbus_services.gateway.counts import Counts
from tokenbus_services.settings import GatewaySettings

_EXTENSION = "tokenbus.connection"
_REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
_MOST_HEADERS = 100
_NS = 1_000_000_000


class Connection(HttpToolsProtocol):
    """One client's connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Take what uvicorn gives; what is ours comes by `bounded`."""
        super().__init__(config, server_state, app_state, _loop)
        self._header_bytes = 0
        self._is_in_headers = True
        self._timer: asyncio.TimerHandle | None = None

    settings: GatewaySettings
    counts: Counts

    # What others ask for.

    @property
    def is_full(self) -> bool:
        """Whether the client reads too slowly to take more just now."""
        return bool(self.flow.write_paused)

    def writer(self, scope: Scope) -> Callable[[bytes, int], bool] | None:
        """Return what writes chunks of an answer that has begun, without waiting; None: nothing may.

        ASGI's `send` has to be awaited by the request's own task, and to wake it costs more than to render a row.
        """
        cycle, flow, transport, observe = self.cycle, self.flow, self.transport, self.counts.to_socket.observe
        # Of several requests that came at once each is answered in its turn, by ASGI's way.
        if cycle.scope is not scope or not cycle.chunked_encoding:
            return None

        def write(chunk: bytes, produced_at_ns: int) -> bool:
            """Write a chunk, if the client reads."""
            if flow.write_paused or cycle.disconnected or transport.is_closing():
                return False
            transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            if produced_at_ns:
                observe((time_ns() - produced_at_ns) / _NS)
            return True

        return write

    async def has_room(self, seconds: float) -> bool:
        """Wait until the client has read enough, or has gone; tell whether it took anything in each such time."""
        while self.is_full:
            before = self.transport.get_write_buffer_size()
            try:
                async with asyncio.timeout(seconds):
                    await self.flow.drain()
            except TimeoutError:
                if self.transport.get_write_buffer_size() >= before:
                    return False
        return True

    def cut_off(self) -> None:
        """Close at once; what was not read is lost."""
        self.transport.abort()

    # What uvicorn calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, unless there are too many."""
        super().connection_made(transport)  # type: ignore[arg-type]  # TCP's
        if len(self.connections) > self.settings.max_connections:
            self.counts.refused_connections += 1
            self._refuse(503, f"connections: at most {self.settings.max_connections}")
            return
        self._wait(self.settings.idle_timeout_ms)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came, if it is not too much of a header."""
        if self.transport.is_closing():
            return
        if self._is_in_headers:
            if not self._header_bytes:  # from its first byte on a request must hurry
                self._wait(self.settings.request_timeout_ms)
            self._header_bytes += len(data)
        super().data_received(data)
        # A body may have come with the header: only what is still a header is too long.
        if self._is_in_headers and self._header_bytes > self.settings.max_header_bytes:
            self._too_long()

    def on_url(self, url: bytes) -> None:
        """Take a piece of the address."""
        super().on_url(url)
        if len(self.url) > self.settings.max_header_bytes:
            self._too_long()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        super().on_header(name, value)
        size = sum(len(key) + len(content) + 4 for key, content in self.headers)
        if len(self.headers) > _MOST_HEADERS or size > self.settings.max_header_bytes:
            self._too_long()

    def on_message_begin(self) -> None:
        """Begin a request, which says where its connection can be had."""
        super().on_message_begin()
        self.scope["extensions"] = {_EXTENSION: self}  # type: ignore[dict-item]  # ours is no dictionary

    def on_headers_complete(self) -> None:
        """Go on with the body, for which there is a time of its own."""
        if self.transport.is_closing():
            return
        self._is_in_headers = False
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        if not self.transport.is_closing():
            self._is_in_headers = True
            self._header_bytes = 0
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        if not self.transport.is_closing():
            self._refuse(400, msg)

    def _too_long(self) -> None:
        if not self.transport.is_closing():
            most = self.settings.max_header_bytes
            self._refuse(431, f"request line and headers: at most {most} bytes and {_MOST_HEADERS} headers")

    def _wait(self, milliseconds: int) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(milliseconds / 1000, self._late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if self.transport.is_closing():
            return
        if self._header_bytes:
            self.counts.late_requests += 1
            self._refuse(408, f"request line and headers: within {self.settings.request_timeout_ms} ms")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        self._stop_waiting()
        self.counts.requests["other", str(status)] += 1
        code = _REASONS[status].lower().replace(" ", "_")
        kind = "overloaded_error" if status == 503 else "invalid_request_error"  # noqa: PLR2004
        body = b'{"error":{"message":"%b","type":"%b","param":null,"code":"%b"}}' % (
            message.encode(),
            kind.encode(),
            code.encode(),
        )
        head = f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()


def bounded(settings: GatewaySettings, counts: Counts) -> type[Connection]:
    """Return the class of connections with these bounds."""
    return type("BoundedConnection", (Connection,), {"settings": settings, "counts": counts})


def connection_of(scope: Scope) -> Connection | None:
    """Return the connection that a request came by, where it is one of ours."""
    extensions: Mapping[str, Any] = scope.get("extensions") or {}
    return extensions.get(_EXTENSION)
