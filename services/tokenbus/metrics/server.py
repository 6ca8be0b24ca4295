"""MetricsServer: serves /metrics, /healthz and /readyz in a separate thread.

The server of prometheus_client starts a thread per connection, without a limit or timeouts. This server implements only
the HTTP that a scrape needs, with one request per connection. Size, time and number of connections are limited.
"""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tokenbus.backports import timeout
from tokenbus.bus.binding import bind
from tokenbus.bus.errors import AddressError
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.loop_thread import start_loop_thread
from tokenbus.metrics.families import Histogram

_log = logger("metrics")
_SCHEME = "tcp://"
_ASK_SECONDS = 0.25
_PAUSE_SECONDS = 0.0002
"""Pause after each metric, so that other threads run during the milliseconds that a page with many workers takes."""
MOST_HEADER_BYTES = 8192
_MOST_CONNECTIONS = 16
_MOST_SECONDS = 10.0
_END = b"\r\n\r\n"
_METHODS = ("GET", "HEAD")
_TEXT = "text/plain; charset=utf-8"


async def listen(key: str, address: str, *, reuse_port: bool = False) -> tuple[socket.socket, str]:
    """Return a socket that is bound to HOST:PORT and listens, and the address with the actual port.

    If `reuse_port`, several processes share the port, and the caller must make the socket listen. Raises an
    AddressError that names the setting.
    """
    try:
        binding = await bind(_SCHEME + address, reuse_port=reuse_port)
    except AddressError as error:
        raise AddressError(f"{key}: {address}", error.reason.replace(_SCHEME, "")) from None
    listening = socket.socket(fileno=binding.descriptor)
    binding.hand_over()
    return listening, binding.address.removeprefix(_SCHEME)


class LoopWatch:
    """Measures from another thread how long an event loop takes to run a callback."""

    def __init__(self, loop: Callable[[], asyncio.AbstractEventLoop | None], now: Callable[[], float]) -> None:
        self._loop = loop
        self._now = now
        self._asked_at: float | None = None
        self.lag = Histogram()

    def ask(self) -> None:
        """Schedule a callback in the loop, unless the last callback is still pending."""
        loop = self._loop()
        if loop is None or self._asked_at is not None:
            return
        self._asked_at = self._now()
        try:
            loop.call_soon_threadsafe(self._answer)
        except RuntimeError:  # the loop is closed, which the health shows
            self._asked_at = None

    def _answer(self) -> None:
        if self._asked_at is not None:
            self.lag.observe(self._now() - self._asked_at)
            self._asked_at = None

    @property
    def stalled_seconds(self) -> float:
        """The age of the pending callback in seconds."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else max(0.0, self._now() - asked_at)


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a process."""

    problems: tuple[str, ...]
    """Problems of the process, which a restart may solve."""
    facts: dict[str, object]
    outside: tuple[str, ...] = ()
    """Problems of other systems, which a restart of this process cannot solve."""
    is_ready: bool = True
    """Whether the process accepts new work, possibly despite problems of other systems."""

    @property
    def body(self) -> bytes:
        """The body of /healthz and /readyz as JSON."""
        state = "failing" if self.problems else "degraded" if self.outside else "ok"
        problems = *self.problems, *self.outside
        return (json.dumps({"status": state, "problems": problems, **self.facts}) + "\n").encode()


def stalled(watch: LoopWatch, most_ms: int) -> list[str]:
    """Return one problem if the event loop has not answered for more than `most_ms`, or else an empty list."""
    seconds = watch.stalled_seconds
    return [f"its event loop has not answered for {seconds:.1f} s"] if seconds * 1000 > most_ms else []


class Answer(NamedTuple):
    """An HTTP response."""

    status: int
    body: bytes
    kind: str = _TEXT


def _written(method: str, answer: Answer) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status:d} {HTTPStatus(answer.status).phrase}",
        f"Content-Type: {answer.kind}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    if answer.status == HTTPStatus.METHOD_NOT_ALLOWED:
        lines.append("Allow: GET, HEAD")
    head = "\r\n".join([*lines, "", ""]).encode()
    return head if method == "HEAD" else head + answer.body


class MetricsServer:
    """Serves metrics and health checks, even while the process's event loop is blocked."""

    def __init__(
        self, key: str, address: str, collector: Collector, health: Callable[[], Health], watch: LoopWatch
    ) -> None:
        """Create a server for `address`, the value of the setting `key`. Without an address, nothing is served."""
        self._key = key
        self._given = address
        self._collector = collector
        self._health = health
        self._watch = watch
        self._stopping: Callable[[], object] = lambda: None
        self._thread: threading.Thread | None = None
        self._pages = {"/metrics": self._metrics, "/healthz": self._healthz, "/readyz": self._readyz}
        self._connections = 0
        self._repeated_log = DeduplicatedLog()
        self.address = ""
        """The address with the actual port, or empty while the server does not listen."""

    @property
    def url(self) -> str:
        """The URL without a path, or empty while the server does not listen."""
        return f"http://{self.address}" if self.address else ""

    def start(self) -> None:
        """Begin to listen. Raises AddressError."""
        if not self._given:
            return
        self._thread, self.address = start_loop_thread("tokenbus-metrics", self._serve, daemon=True)
        _log.info("serving metrics", address=self.url)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Listen within an `async with` block, without blocking the event loop."""
        await asyncio.to_thread(self.start)
        try:
            yield
        finally:
            await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """Stop the server. The address is free when this function returns."""
        if self._thread is not None:
            self._stopping()
            self._thread.join()
            self._thread = None
            self.address = ""

    async def _serve(self, started: "Future[str]") -> None:
        listening, address = await listen(self._key, self._given)
        server = await asyncio.start_server(self._answer, sock=listening, limit=MOST_HEADER_BYTES)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._stopping = lambda: loop.call_soon_threadsafe(stop.set)
        started.set_result(address)
        try:
            while not stop.is_set():
                self._watch.ask()
                with contextlib.suppress(TimeoutError):
                    async with timeout(_ASK_SECONDS):
                        await stop.wait()
        finally:
            server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the only request of a connection. Slow and silent clients are disconnected."""
        if self._connections >= _MOST_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections += 1
        try:
            with contextlib.suppress(
                TimeoutError, ConnectionError, asyncio.IncompleteReadError
            ):  # ignore broken connections
                async with timeout(_MOST_SECONDS):
                    method, answer = await self._answer_to(reader)
                    writer.write(_written(method, answer))
                    writer.close()
                    await writer.wait_closed()
        finally:
            writer.transport.abort()
            self._connections -= 1

    async def _answer_to(self, reader: asyncio.StreamReader) -> tuple[str, Answer]:
        try:
            head = await reader.readuntil(_END)
        except asyncio.LimitOverrunError:
            return "GET", Answer(HTTPStatus.BAD_REQUEST, b"the request's header is too long\n")
        words = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):  # noqa: PLR2004 - method, target, protocol
            return "GET", Answer(HTTPStatus.BAD_REQUEST, b"expected a request of HTTP/1.1\n")
        method, path = words[0], words[1].partition("?")[0]
        page = self._pages.get(path)
        if method not in _METHODS:
            answer = Answer(HTTPStatus.METHOD_NOT_ALLOWED, b"GET and HEAD only\n")
        elif page is None:
            answer = Answer(HTTPStatus.NOT_FOUND, f"there is {' and '.join(self._pages)}\n".encode())
        else:
            try:
                answer = await page()
            except Exception:  # noqa: BLE001 - a defect of one page must not end the server
                self._repeated_log.begin("page", _log.exception, "metrics handler failed", path=path)
                reason = b"the handler of this page failed; see the log\n"
                answer = Answer(HTTPStatus.INTERNAL_SERVER_ERROR, reason)
        return method, answer

    async def _metrics(self) -> Answer:
        page = []
        for metric in self._collector.collect():
            page.append(generate_latest(_One(metric)))
            await asyncio.sleep(_PAUSE_SECONDS)
        return Answer(HTTPStatus.OK, b"".join(page), CONTENT_TYPE_LATEST)

    async def _healthz(self) -> Answer:
        health = self._health()
        return _answer_of(health, is_good=not health.problems)

    async def _readyz(self) -> Answer:
        health = self._health()
        return _answer_of(health, is_good=health.is_ready and not health.problems)


def _answer_of(health: Health, *, is_good: bool) -> Answer:
    status = HTTPStatus.OK if is_good else HTTPStatus.SERVICE_UNAVAILABLE
    return Answer(status, health.body, "application/json")


@dataclass(frozen=True, slots=True)
class _One(Collector):
    """A collector of one metric, in the form that prometheus_client requires."""

    metric: Metric

    def collect(self) -> list[Metric]:
        return [self.metric]
