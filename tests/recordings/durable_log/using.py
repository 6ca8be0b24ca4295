"""Helpers of the durable log's tests: settings, writers, reading, and a processor's log."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from nats.js.api import StreamConfig

from tests.cli.helpers import BATCH, EPOCH, hello, memory_settings, payloads
from tests.metrics.running import Bus, Scrape, scrape, settings
from tests.support.nats import NatsServer
from tests.support.waiting import MOST, soon, until
from tokenbus.metrics.processor import StepTimes, processor_collector, processor_health
from tokenbus.metrics.server import Health, LoopWatch
from tokenbus.processor import Processor
from tokenbus.recordings.durable_log.reader import read_log
from tokenbus.recordings.durable_log.stream import LogError, LogStream
from tokenbus.recordings.durable_log.writer import LogWriter
from tokenbus.recordings.items import StreamItem
from tokenbus.settings import Settings
from tokenbus_contracts.generated.stream_pb2 import Hello, PayloadKind


class Life(NamedTuple):
    epoch: int
    hello: Hello

    def item(self, sequence: int, kind: PayloadKind = BATCH, payload: bytes = b"x" * 100) -> StreamItem:
        return StreamItem(self.hello, self.epoch, sequence, kind, payload)


STREAM = Life(EPOCH, hello())


def log_settings(server: NatsServer, **overrides: object) -> Settings:
    common = {
        "durable_log__address": server.log_address,
        "bus__reconnect_ms": 10,
        "bus__reconnect_max_ms": 50,
        "bus__heartbeat_timeout_ms": 10_000,
    }
    return memory_settings(**(common | overrides))


@asynccontextmanager
async def writer_of(settings: Settings, wait_seconds: float = 0) -> AsyncIterator[LogWriter]:
    """Yield a writer whose log can be written, and wait at the end until the log has all items; not after an error."""
    writer, drain_seconds = LogWriter(LogStream(settings), settings, wait_seconds=wait_seconds), 0.0
    await writer.open(LogError, 2 * settings.bus.heartbeat_timeout_ms / 1000)
    try:
        yield writer
        drain_seconds = MOST
    finally:
        await writer.close(drain_seconds)


async def write(writer: LogWriter, numbers: Iterable[int], stream: Life = STREAM, payload: bytes = b"x" * 100) -> None:
    for sequence in numbers:
        await writer.write(stream.item(sequence, payload=payload))


async def log_with(server: NatsServer, numbers: Iterable[int], **overrides: object) -> Settings:
    settings = log_settings(server, **overrides)
    async with writer_of(settings) as writer:
        await write(writer, numbers)
    return settings


async def filled(server: NatsServer, *lives: Life, without: range = range(0)) -> None:
    async with writer_of(log_settings(server)) as writer:
        for life in lives:
            for sequence, kind, payload in payloads():
                if sequence not in without:
                    await writer.write(life.item(sequence, kind, payload))


async def read(settings: Settings, **how: object) -> list[StreamItem]:
    return await soon(_read(settings, **how))


@asynccontextmanager
async def full(settings: Settings) -> AsyncIterator[None]:
    connection = await LogStream(settings).connect()
    jetstream = connection.client.jetstream()
    await jetstream.add_stream(name="other", subjects=["other"])
    with suppress(Exception):
        while True:
            await jetstream.publish("other", b"x" * 100_000)
    yield
    await jetstream.delete_stream("other")
    await connection.close()


async def kept(settings: Settings) -> StreamConfig:
    stream = LogStream(settings)
    connection = await stream.connect()
    info = await stream.info(connection, make=False)
    await connection.close()
    return info.config


async def _read(settings: Settings, **how: object) -> list[StreamItem]:
    return [item async for item in read_log(settings=settings, **how)]  # type: ignore[arg-type]


def sequences(items: Iterable[StreamItem]) -> list[int]:
    return [item.sequence for item in items]


def numbered(items: Iterable[StreamItem]) -> list[tuple[int, int]]:
    return [(item.sequence, item.missing_items) for item in items]


def whole(last: int) -> list[tuple[int, int]]:
    """Return what `numbered` does of all items up to the last one."""
    return [(sequence, 0) for sequence in range(1, last + 1)]


async def written(writer: LogWriter) -> None:
    await until(lambda: not writer.unwritten_items)


# A processor's log.

QUICK: dict[str, object] = {
    "bus__reconnect_ms": 10,
    "bus__reconnect_max_ms": 50,
    "bus__heartbeat_ms": 100,
    "bus__heartbeat_timeout_ms": 10_000,
    "limits__max_message_bytes": 500_000,
}
SMALL: dict[str, object] = {"limits__max_message_bytes": 4096, "durable_log__buffer_bytes": 4096}
JETSTREAM = "jetstream {{ store_dir: '{folder}/js' }}\n"


def logging_to(*servers: NatsServer, **changed: object) -> Settings:
    """Return the settings of a processor that keeps its log at some servers, with a replica at each."""
    common = {
        "durable_log__address": f"nats://{','.join(server.server for server in servers)}/{servers[0].log}",
        "durable_log__replicas": len(servers),
    }
    return settings(**QUICK | common | changed)


def told(processor: Processor) -> Scrape:
    clock = processor.clock.now
    return scrape(processor_collector(processor, StepTimes(clock), LoopWatch(lambda: None, clock)))


def health(processor: Processor) -> Health:
    return processor_health(processor, LoopWatch(lambda: None, processor.clock.now))


def says_that_it_does_not_log(processor: Processor) -> bool:
    found = " ".join(health(processor).outside)
    return told(processor)("log_writable_servers") == 0 and "durable log is not written" in found


async def logged(bus: Bus) -> int:
    await until(lambda: told(bus.processor)("log_waiting_items") == 0, every=0.05)
    return bus.publisher.retention.next_sequence - 1


def restarted(server: NatsServer, config: str) -> Callable[[], None]:
    """Restart a server with another configuration; return a function that restarts it with its own."""
    own, server._config = server._config, config
    server.kill()
    server.start()

    def bring_back() -> None:
        server._config = own
        server.kill()
        server.start()

    return bring_back
