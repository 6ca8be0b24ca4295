"""MetricsServer: /metrics and /healthz, in a thread and an event loop of its own."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tokenbus_services.bus.binding import Binding, bind
from tokenbus_services.bus.errors import AddressError
from tokenbus_services.logs import logger
from tokenbus_services.loop_thread import start_loop_thread
from tokenbus_services.metrics.errors import MetricsAddressError
from tokenbus_services.metrics.health import Health
from tokenbus_services.metrics.http import MOST_HEADER_BYTES, Answer, Pages
from tokenbus_services.metrics.loop import LoopWatch

_log = logger("metrics")
_SCHEME = "tcp://"
_ASK_SECONDS = 0.25
# Between two metrics, so that whoever waits for the interpreter gets it: a page of many workers takes milliseconds.
_BREATH_SECONDS = 0.0002
_OK, _UNAVAILABLE = 200, 503


class MetricsServer:
    """Serves what a collector reads and what a health check finds, so that a stuck process can still be asked."""

    def __init__(
        self, key: str, address: str, collector: Collector, health: Callable[[], Health], watch: LoopWatch
    ) -> None:
        """Take the setting that says where to listen, and what it says; nothing is served where it is empty."""
        self._key = key
        self._given = address
        self._collector = collector
        self._health = health
        self._watch = watch
        self._stopping: Callable[[], object] = lambda: None
        self._thread: threading.Thread | None = None
        self.address = ""
        """Where it listens, HOST:PORT with the port that was chosen; empty while it does not."""

    @property
    def url(self) -> str:
        """Where to ask, without a path."""
        return f"http://{self.address}" if self.address else ""

    def start(self) -> None:
        """Listen, or raise a MetricsAddressError."""
        if not self._given:
            return
        self._thread, self.address = start_loop_thread("tokenbus-metrics", self._serve, daemon=True)
        _log.info("serving metrics", address=self.url)

    def stop(self) -> None:
        """Stop listening; the address is free on return."""
        if self._thread is not None:
            self._stopping()
            self._thread.join()
            self._thread = None
            self.address = ""

    async def _serve(self, started: "Future[str]") -> None:
        binding = await self._bind()
        listening = socket.socket(fileno=binding.descriptor)
        binding.hand_over()
        pages = Pages({"/metrics": self._metrics, "/healthz": self._healthz})
        server = await asyncio.start_server(pages.serve, sock=listening, limit=MOST_HEADER_BYTES)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._stopping = lambda: loop.call_soon_threadsafe(stop.set)
        started.set_result(binding.address.removeprefix(_SCHEME))
        try:
            while not stop.is_set():
                self._watch.ask()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_ASK_SECONDS):
                        await stop.wait()
        finally:
            server.close()

    async def _bind(self) -> Binding:
        try:
            return await bind(_SCHEME + self._given)
        except AddressError as error:
            raise MetricsAddressError(self._key, self._given, error.reason.replace(_SCHEME, "")) from None

    async def _metrics(self) -> Answer:
        page = []
        for metric in self._collector.collect():
            page.append(generate_latest(_One(metric)))
            await asyncio.sleep(_BREATH_SECONDS)
        return Answer(_OK, b"".join(page), CONTENT_TYPE_LATEST)

    async def _healthz(self) -> Answer:
        health = self._health()
        return Answer(_UNAVAILABLE if health.problems else _OK, health.body, "application/json")


class _One(Collector):
    """One metric, for prometheus_client to write."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> list[Metric]:
        """Return it."""
        return [self._metric]
