"""Helpers of the durable log's tests: settings, writers, and reading."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from nats.js.api import StreamConfig

from tests.services.cli.helpers import BATCH, EPOCH, hello, memory_settings, payloads
from tests.support.nats import NatsServer
from tests.support.waiting import MOST, soon
from tokenbus_contracts.generated.stream_pb2 import Hello, PayloadKind
from tokenbus_services.durable_log.reader import read_log
from tokenbus_services.durable_log.stream import LogStream
from tokenbus_services.durable_log.writer import LogWriter
from tokenbus_services.items import StreamItem
from tokenbus_services.settings import Settings


class Life(NamedTuple):
    """One life of a worker."""

    epoch: int
    hello: Hello

    def item(self, sequence: int, kind: PayloadKind = BATCH, payload: bytes = b"x" * 100) -> StreamItem:
        return StreamItem(self.hello, self.epoch, sequence, kind, payload)


STREAM = Life(EPOCH, hello())


def log_settings(server: NatsServer, **overrides: object) -> Settings:
    common = {
        "durable_log__address": f"nats://{server.server}",
        "bus__reconnect_ms": 10,
        "bus__reconnect_max_ms": 50,
        "bus__heartbeat_timeout_ms": 10_000,
    }
    return memory_settings(**(common | overrides))


def writer_of(settings: Settings, wait_seconds: float = 0) -> LogWriter:
    return LogWriter(LogStream(settings), settings, wait_seconds=wait_seconds, drain_seconds=MOST)


async def write(writer: LogWriter, numbers: Iterable[int], stream: Life = STREAM, payload: bytes = b"x" * 100) -> None:
    for sequence in numbers:
        await writer.write(stream.item(sequence, payload=payload))


async def filled(server: NatsServer, *lives: Life, without: range = range(0)) -> None:
    """Write a worker's items of three requests into the log, for each of some lives."""
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
    await connection.close(0)


async def kept(settings: Settings) -> StreamConfig:
    stream = LogStream(settings)
    connection = await stream.connect()
    info = await stream.info(connection, make=False)
    await connection.close(0)
    return info.config


async def _read(settings: Settings, **how: object) -> list[StreamItem]:
    return [item async for item in read_log(settings=settings, **how)]  # type: ignore[arg-type]


def sequences(items: Iterable[StreamItem]) -> list[int]:
    return [item.sequence for item in items]
