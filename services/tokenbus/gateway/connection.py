"""Connection: uvicorn's HTTP/1.1 protocol, extended by a limit on header bytes, by timeouts and by backpressure."""

import asyncio
import contextlib
import fcntl
import re
import termios
from array import array
from collections.abc import Mapping
from http import HTTPStatus
from time import time_ns
from typing import Any

import httptools
import orjson
from starlette.types import ASGIApp, Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.event_writer import EventStream
from tokenbus.gateway.gateway import Gateway

_EXTENSION = "tokenbus.connection"
_MAX_HEADERS = 100
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::[0-9]*)?")
_MAX_UNSENT_BYTES = 16_384
_MAX_PIPELINED = 16
_NS = 1_000_000_000


class Connection(HttpToolsProtocol):
    """The connection of one client."""

    def __init__(self, gateway: Gateway, config: Config, server_state: ServerState, app_state: dict[str, Any]) -> None:
        super().__init__(config, server_state, app_state)
        self.settings, self.counts = gateway.settings.gateway, gateway.counts
        self._header_bytes = 0
        """Number of bytes received outside of bodies: in headers, chunk sizes and trailers."""
        self._is_in_headers = True
        self._timer: asyncio.TimerHandle | None = None
        self.stream: EventStream | None = None
        """The stream whose events the compiled renderer may send to the socket."""
        self._answered: RequestResponseCycle | None = None

    @property
    def is_answering(self) -> bool:
        return self._answered is not None and not self._answered.response_complete

    @property
    def is_full(self) -> bool:
        """Whether writing is paused because the client is too slow."""
        return bool(self.flow.write_paused)

    def unsent(self) -> int:
        """Return the number of unread bytes in this process and in the kernel."""
        if self.transport.is_closing():
            return 0
        waiting = array("i", [0])
        # If the ioctl fails, the bytes in the kernel are not counted.
        with contextlib.suppress(OSError, ValueError):
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, waiting)
        return self.transport.get_write_buffer_size() + waiting[0]

    def writer(self, scope: Scope) -> "ChunkWriter | None":
        """Return a writer that bypasses ASGI for the current answer, or None if the answer must use ASGI.

        Only the request's task can await `send` of ASGI, and waking a task costs more than rendering a row.
        """
        # Answers to pipelined requests use ASGI, which keeps them in order.
        if self.cycle.scope is not scope or not self.cycle.chunked_encoding:
            return None
        return ChunkWriter(self)

    async def has_room(self) -> bool:
        """Wait for the client to read. Return False if the client reads nothing for gateway.write_timeout_ms."""
        while self.is_full:
            before = self.transport.get_write_buffer_size()
            try:
                async with asyncio.timeout(self.settings.write_timeout_ms / 1000):
                    await self.flow.drain()
            except TimeoutError:
                if self.transport.get_write_buffer_size() >= before:
                    return False
        return True

    def cut_off(self) -> None:
        if self._answered is not None:
            # uvicorn would set `disconnected` too late, and would log the incomplete answer as an error.
            self._answered.disconnected = True
        self.transport.abort()

    # The following methods are called by uvicorn and httptools.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]  # TCP's
        # Keep the transport's buffer small, because the bytes in it can no longer be dropped.
        self.transport.set_write_buffer_limits(high=_MAX_UNSENT_BYTES)
        if len(self.connections) > self.settings.most_connections:
            self.counts.refused_connections += 1
            self._refuse(503, f"connections: at most {self.settings.most_connections}")
            return
        self._start_timer(self.settings.idle_timeout_ms)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.stream is not None:  # the closed socket's number may be reused
            self.stream.socket = -1
        self._stop_timer()
        super().connection_lost(exc)
        # Tell the request's handler of the disconnect: uvicorn tells only the last of several pipelined requests.
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        # A request's timeout begins with its first byte, unless an earlier request is still being answered.
        if self._is_in_headers and not self.is_answering and (self._timer is None or not self._header_bytes):
            self._start_timer(self.settings.request_timeout_ms)
        self._header_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        # `_parse` resets the count when a body begins, so a body in the same packet as the headers is not counted.
        if self._header_bytes > self.settings.max_header_bytes:
            self._too_long()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_headers:  # outside of headers, this is a trailer, which is dropped
            super().on_header(name, value)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_headers = True
        self.scope["extensions"] = {_EXTENSION: self}  # type: ignore[dict-item]  # ours is not a dictionary

    def on_headers_complete(self) -> None:
        """Stop the timeout for receiving headers, check the headers, and prepare to receive the body."""
        size = max(len(self.url), sum(len(name) + len(value) + 4 for name, value in self.headers))
        if len(self.headers) > _MAX_HEADERS or size > self.settings.max_header_bytes:
            self._too_long()
        if self.transport.is_closing() or not self._has_host():
            return
        self._is_in_headers = False
        self._header_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        if len(self.pipeline) > _MAX_PIPELINED:
            self._refuse(400, f"pipelined requests: at most {_MAX_PIPELINED}")
        elif self.pipeline:  # a paused transport would not notice a disconnected client
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._header_bytes = 0
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.transport.is_closing():
            return
        self._is_in_headers = True
        self._header_bytes = 0
        super().on_message_complete()
        if not self.is_answering:  # the request was answered already, so the connection is idle
            self._start_timer(self.settings.idle_timeout_ms)

    def on_response_complete(self) -> None:
        """Start the timeout for the rest of the request's body if the body is incomplete."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._cut_off_unread()
        elif not self.is_answering and not self._is_in_headers:
            self._start_timer(self.settings.request_timeout_ms)

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._answered = cycle
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]  # the same, as uvicorn spells it

    def _should_upgrade(self) -> bool:
        """Return whether the request asks for another protocol, which the gateway does not support."""
        return self._get_upgrade() is not None

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(400, "malformed HTTP request")

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse the request again without its upgrade header, which Java's client sends to offer HTTP/2."""
        if not self._should_upgrade():  # without an upgrade header, the method is CONNECT
            self._refuse(400, "CONNECT is not supported")
            return
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        headers = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # uvicorn does so for its own parser
        self._parse(b"".join([line, *headers, b"\r\n", rest]))

    def _has_host(self) -> bool:
        """Return whether the request has exactly one Host header, and refuse other requests.

        With several Host headers, a proxy and the gateway might read different ones.
        """
        hosts = [value.decode("latin-1") for name, value in self.headers if name == b"host"]
        url, is_old = self.url.decode("latin-1"), self.parser.get_http_version() == "1.0"
        if "://" in url.partition("?")[0]:
            hosts += [url.partition("://")[2].partition("/")[0]] if len(hosts) == 1 else []
            if len(set(hosts)) != 1:
                self._refuse(400, "host: the same in the header Host and in the request line")
                return False
        elif len(hosts) != 1 and not (is_old and not hosts):
            self._refuse(400, f"host: one header Host, got {len(hosts)}")
            return False
        if hosts and host_of(hosts[0]) is None:
            self._refuse(400, "host: a name or an address, and optionally a port")
            return False
        return True

    def _too_long(self) -> None:
        most = self.settings.max_header_bytes
        self._refuse(431, f"request line and headers: at most {most} bytes and {_MAX_HEADERS} headers")

    def _start_timer(self, milliseconds: int) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(milliseconds / 1000, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        if self.transport.is_closing():
            return
        if self._is_in_headers and self._header_bytes:
            self.counts.late_requests += 1
            self._refuse(408, f"request line and headers: within {self.settings.request_timeout_ms} ms")
        else:
            self._close()

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
            self._cut_off_unread()

    def _cut_off_unread(self, before: int = 0) -> None:
        """Abort a closed connection if the client does not read the remaining bytes in time."""
        self._stop_timer()
        left = self.transport.get_write_buffer_size()
        if before and left >= before:
            self.counts.cut_clients += 1
            self.transport.abort()
        elif left:
            seconds = self.settings.write_timeout_ms / 1000
            self._timer = self.loop.call_later(seconds, self._cut_off_unread, left)

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        answered = self._answered
        is_behind = self._is_in_headers or self.cycle is not answered
        if answered is not None and not answered.response_complete and (is_behind or answered.response_started):
            # The client would mistake the error for a part of an earlier answer.
            self._close()
            return
        self._stop_timer()
        self.counts.requests["other", str(status)] += 1
        reason = HTTPStatus(status).phrase
        body = orjson.dumps(ApiError(status, message, code=reason.lower().replace(" ", "_")).body)
        head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self._close()


class ChunkWriter:
    """Writes chunks of one answer to the connection without ASGI. Implements `Write`."""

    def __init__(self, connection: Connection) -> None:
        self._cycle, self._flow, self._transport = connection.cycle, connection.flow, connection.transport
        self._observe = connection.counts.to_socket.observe
        is_plain = connection.transport.get_extra_info("sslcontext") is None
        self._socket = connection.transport.get_extra_info("socket") if is_plain else None

    def __call__(self, chunk: bytes, *produced_at_ns: int) -> bool:
        """Write a chunk. Return False if the client is gone or reads too slowly."""
        if not self._is_open():
            return False
        self._transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        now = time_ns()
        for each in produced_at_ns:
            if each:
                self._observe((now - each) / _NS)
        return True

    def descriptor(self) -> int:
        """Return the file descriptor of the socket, or -1 if bytes wait in the transport."""
        if self._socket is None or not self._is_open() or self._transport.get_write_buffer_size():
            return -1
        return self._socket.fileno()  # type: ignore[no-any-return]

    def send_rest(self, rest: bytes) -> None:
        self._transport.write(rest)

    def _is_open(self) -> bool:
        return not (self._flow.write_paused or self._cycle.disconnected or self._transport.is_closing())


def host_of(authority: str) -> str | None:
    """Return the host in a Host header or an address, in lower case and without the port, or None if malformed."""
    matched = _AUTHORITY.fullmatch(authority)
    return matched[1].lower().rstrip(".") if matched else None


def connection_of(scope: Scope) -> Connection | None:
    extensions: Mapping[str, Any] = scope.get("extensions") or {}
    return extensions.get(_EXTENSION)
