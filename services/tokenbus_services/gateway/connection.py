"""Connection: uvicorn's HTTP over httptools, with the bounds that it lacks: header bytes, and times to arrive."""

import asyncio
import contextlib
import fcntl
import re
import termios
from array import array
from collections.abc import Callable, Mapping
from time import time_ns
from typing import Any

import httptools
from starlette.types import ASGIApp, Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from tokenbus_services.gateway.metrics import Counts
from tokenbus_services.settings import GatewaySettings

_EXTENSION = "tokenbus.connection"
_REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
_MOST_HEADERS = 100
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::[0-9]*)?")
_MOST_UNSENT = 16_384
_MOST_WAITING = 16
"""As many requests may wait on one connection for the answers before theirs."""
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
        """What came that is no body: of headers, or between chunks and behind them."""
        self._is_in_headers = True
        self._timer: asyncio.TimerHandle | None = None
        self._answered: RequestResponseCycle | None = None
        """The request that is being answered, or was last."""

    settings: GatewaySettings
    counts: Counts

    # What others ask for.

    @property
    def is_answering(self) -> bool:
        """Whether a request is there whose answer has not ended."""
        return self._answered is not None and not self._answered.response_complete

    @property
    def is_full(self) -> bool:
        """Whether the client reads too slowly to take more just now."""
        return bool(self.flow.write_paused)

    def unsent(self) -> int:
        """Return how many bytes wait here and in the kernel because the client has not taken them."""
        if self.transport.is_closing():
            return 0
        waiting = array("i", [0])
        # Where the system cannot tell, what waits here counts alone.
        with contextlib.suppress(OSError, ValueError):
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, waiting)
        return self.transport.get_write_buffer_size() + waiting[0]

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
        # What waits here is not in the answer's outbox any more, where it could be thrown away.
        self.transport.set_write_buffer_limits(high=_MOST_UNSENT)
        if len(self.connections) > self.settings.max_connections:
            self.counts.refused_connections += 1
            self._refuse(503, f"connections: at most {self.settings.max_connections}")
            return
        self._wait(self.settings.idle_timeout_ms)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._stop_waiting()
        super().connection_lost(exc)
        # uvicorn tells the last of several requests that came at once; the one that is being answered has to know.
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Take what came, if it is not too much of a header."""
        if self.transport.is_closing():
            return
        # From its first byte on a request must hurry; behind one that is not answered yet it has time.
        if self._is_in_headers and not self.is_answering and (self._timer is None or not self._header_bytes):
            self._wait(self.settings.request_timeout_ms)
        self._header_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        # A body may have come with the header: only what is still none is too long.
        if self._header_bytes > self.settings.max_header_bytes:
            self._too_long()

    def on_url(self, url: bytes) -> None:
        """Take a piece of the address."""
        super().on_url(url)
        if len(self.url) > self.settings.max_header_bytes:
            self._too_long()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; one behind a body says nothing that is needed."""
        if not self._is_in_headers:
            return
        super().on_header(name, value)
        size = sum(len(key) + len(content) + 4 for key, content in self.headers)
        if len(self.headers) > _MOST_HEADERS or size > self.settings.max_header_bytes:
            self._too_long()

    def on_message_begin(self) -> None:
        """Begin a request, which says where its connection can be had."""
        super().on_message_begin()
        self._is_in_headers = True
        self.scope["extensions"] = {_EXTENSION: self}  # type: ignore[dict-item]  # ours is no dictionary

    def on_headers_complete(self) -> None:
        """Go on with the body, for which there is a time of its own."""
        if self.transport.is_closing():
            return
        if not self._has_host():
            return
        self._is_in_headers = False
        self._header_bytes = 0
        self._stop_waiting()
        super().on_headers_complete()
        if len(self.pipeline) > _MOST_WAITING:
            self._refuse(400, f"requests on one connection before their answers: at most {_MOST_WAITING}")
        elif self.pipeline:  # who does not read does not notice that the client leaves
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._header_bytes = 0
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        if self.transport.is_closing():
            return
        self._is_in_headers = True
        self._header_bytes = 0
        super().on_message_complete()
        if not self.is_answering:  # it was answered before all of it was here: only now the connection is idle
            self._wait(self.settings.idle_timeout_ms)

    def on_response_complete(self) -> None:
        """Go on with the next request, if one waits; what is left of this one's body must hurry."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._see_it_taken()
        elif not self.is_answering and not self._is_in_headers:
            self._wait(self.settings.request_timeout_ms)

    def timeout_keep_alive_handler(self) -> None:
        """Close what was idle for too long."""
        self._close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._answered = cycle
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]  # the same, as uvicorn spells it

    def _should_upgrade(self) -> bool:
        """Tell whether a request is to be read again, without what asks for another protocol."""
        return self._get_upgrade() is not None

    # What it does with that.

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(400, "what came is no HTTP request")

    def _stay(self, rest: bytes) -> None:
        """Take a request as it is that asks for another protocol: none is offered, and the parser left its body out.

        As Java's client asks for HTTP/2 with each request.
        """
        if not self._should_upgrade():  # then it was CONNECT
            self._refuse(400, "what came is no request for this server")
            return
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        headers = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        self._parse(b"".join([line, *headers, b"\r\n", rest]))

    def _has_host(self) -> bool:
        """Tell whether a request names one host, or refuse it: what is before or behind might take it for another."""
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
            self._refuse(400, "host: a name or an address, and perhaps a port")
            return False
        return True

    def _too_long(self) -> None:
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
        if self._is_in_headers and self._header_bytes:
            self.counts.late_requests += 1
            self._refuse(408, f"request line and headers: within {self.settings.request_timeout_ms} ms")
        else:
            self._close()

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
            self._see_it_taken()

    def _see_it_taken(self, before: int = 0) -> None:
        """Look now and then whether the client takes what is left of a connection that is closed; else cut it off."""
        self._stop_waiting()
        left = self.transport.get_write_buffer_size()
        if before and left >= before:
            self.counts.cut_clients += 1
            self.transport.abort()
        elif left:
            seconds = self.settings.write_timeout_ms / 1000
            self._timer = self.loop.call_later(seconds, self._see_it_taken, left)

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        answered = self._answered
        is_behind = self._is_in_headers or self.cycle is not answered
        if answered is not None and not answered.response_complete and (is_behind or answered.response_started):
            # Another request's answer is due, or under way: what stood in it now would be taken for a part of it.
            self._close()
            return
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
        self._close()


def host_of(authority: str) -> str | None:
    """Return the host that a Host header or an address names, in lower case and without its port; None: it is none."""
    matched = _AUTHORITY.fullmatch(authority)
    return matched[1].lower().rstrip(".") if matched else None


def bounded(settings: GatewaySettings, counts: Counts) -> type[Connection]:
    """Return the class of connections with these bounds."""
    return type("BoundedConnection", (Connection,), {"settings": settings, "counts": counts})


def connection_of(scope: Scope) -> Connection | None:
    """Return the connection that a request came by, where it is one of ours."""
    extensions: Mapping[str, Any] = scope.get("extensions") or {}
    return extensions.get(_EXTENSION)
