"""Gateway: what one gateway process has, and whether it does what it is there for."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tokenbus_services.client import Client
from tokenbus_services.gateway.buffers import Buffers
from tokenbus_services.gateway.callers import Callers
from tokenbus_services.gateway.completion_request import Reader
from tokenbus_services.gateway.dispatcher import Feed
from tokenbus_services.gateway.metrics import GATEWAY
from tokenbus_services.gateway.processor_status import StatusCache, UnknownStatusError, takes_requests
from tokenbus_services.gateway.stats import Counts
from tokenbus_services.gateway.tables import tables_of
from tokenbus_services.gateway.tls import Certificate
from tokenbus_services.gateway.vocabulary import vocabulary_of
from tokenbus_services.link import SessionState
from tokenbus_services.logs import DeduplicatedLog
from tokenbus_services.metrics.collectors import of_process
from tokenbus_services.metrics.families import Histogram, collect
from tokenbus_services.metrics.health import Health, LoopWatch, stalled
from tokenbus_services.settings import Settings


class Gateway:
    """One client of the bus, and everything that answers are made with."""

    def __init__(self, settings: Settings, client: Client) -> None:
        """Take the settings, and the client that is connected or will be."""
        self.settings = settings
        self.client = client
        self.counts = Counts()
        vocabulary = vocabulary_of(settings.gateway.tokenizer)
        self.tables = tables_of(settings)
        self.reader = Reader(settings.gateway, vocabulary)
        self.buffers = Buffers(settings.gateway.buffer_bytes)
        self.feed = Feed(client, vocabulary, settings.gateway, self.buffers)
        self.episodes = DeduplicatedLog()
        self.callers = Callers(settings.gateway)
        self.callers.on_revoked = self.feed.revoke
        self.certificate = Certificate(settings.gateway) if settings.gateway.tls_certificate else None
        self.status = StatusCache(client, settings.gateway.bus_timeout_ms)
        loop = asyncio.get_running_loop()
        self.watch = LoopWatch(lambda: loop, time.monotonic)
        self.collector: Collector = _GatewayCollector(self)
        self.feeding: asyncio.Task[None] | None = None
        """What hands out rows, while it is served."""
        self.connected = 0
        """How many connections there are; who serves keeps it."""

    @property
    def unread_files(self) -> int:
        """How many files have changed and cannot be read, so that what was read before still holds."""
        return self.callers.is_unread + (self.certificate is not None and self.certificate.is_unread)

    def look(self) -> None:
        """Look at what changes by itself; it is to be called now and then."""
        self.watch.ask()
        self.feed.look()
        self.episodes.expire()
        self.callers.look()
        if self.certificate is not None:
            self.certificate.look()

    def health(self) -> Health:
        """Tell whether requests can be taken; a processor that is away is none of this process's problems."""
        problems = stalled(self.watch, self.settings.metrics.stall_timeout_ms)
        session = self.client.session
        if session.state is SessionState.REFUSED and session.refusal is not None:
            problems.append(f"its processor refuses it: {session.refusal.message}")
        if self.feeding is not None and (self.feeding.done() or not self.client.is_running):
            problems.append("what carries its tokens has ended by a defect: it can only be started again")
        facts = {
            "service": "gateway",
            "connection": session.state.name.lower(),
            "processor": session.processor_id,
            "open_requests": len(self.feed),
            "is_draining": self.feed.is_draining,
        }
        return Health(tuple(problems), facts)

    async def why_not_ready(self) -> list[str]:
        """Return why a request would find no worker; empty if it would find one."""
        if self.feed.is_draining:
            return ["it is stopping"]
        if self.client.session.state is not SessionState.OPEN:
            return ["no processor answers"]
        try:
            status = await self.status.get()
        except UnknownStatusError as error:
            return [str(error)]
        is_ready = takes_requests(status.workers, self.reader.models)
        return [] if is_ready else ["no worker is connected that takes requests"]


@asynccontextmanager
async def gateway_of(settings: Settings) -> AsyncIterator[Gateway]:
    """Connect to the bus, and hand out what comes from it, for as long as `async with` lasts."""
    async with Client(settings) as client:
        gateway = Gateway(settings, client)
        gateway.feeding = feeding = asyncio.create_task(gateway.feed.run())
        try:
            # Before anything is asked for: from then on rows come by the feed alone.
            await asyncio.sleep(0)
            yield gateway
        finally:
            gateway.feed.give_up()
            gateway.feeding = None
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)


class _GatewayCollector(Collector):
    """Reads a gateway's plain counters when it is scraped."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        """Read all metrics, one after the other."""
        yield from collect(GATEWAY, _View(self._gateway))
        yield from of_process("gateway")


class _View:
    """A gateway as one scrape sees it."""

    def __init__(self, gateway: Gateway) -> None:
        self.counts = gateway.counts
        self.feed = gateway.feed
        self.buffers = gateway.buffers
        self.client = gateway.client
        self.settings = gateway.settings.gateway
        self.connections = gateway.connected
        self.unread_files = gateway.unread_files
        self.lag: Histogram = gateway.watch.lag
