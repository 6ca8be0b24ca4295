"""Measure the durable log beside bare nats-py, and its readers' cost: `python -m benchmarks.durable_log`.

Real nats-server processes on this machine. In turn, one process writes messages of random bytes to a JetStream stream
by nats-py alone, and items of as many bytes to a durable log; and items while one, two and four processes read them.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import NamedTuple

import nats
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

from benchmarks.errors import NotRunError, WrongDeliveryError
from benchmarks.processes import Child, processor_seconds
from benchmarks.report import Report, Row, progress
from tests.support.nats import NatsServer
from tests.support.nats_cluster import cluster
from tokenbus_contracts.generated.stream_pb2 import PayloadKind
from tokenbus_services.durable_log.reader import read_log
from tokenbus_services.durable_log.stream import LogError, LogStream
from tokenbus_services.durable_log.writer import LogWriter
from tokenbus_services.items import StreamItem
from tokenbus_services.settings import Settings
from tokenbus_services.worker.session import HandoffPoint, hello_of

_REPLICAS = (3, 1)
_IN_FLIGHT = 64
"""How many messages of bare nats-py, and how many items, are written and not acknowledged yet, at most."""
_BASE = "1"
_READERS = {_BASE: 1, "1 again": 1, "2": 2, "4": 4}
"""One reader is measured twice: the second differs from the first by noise alone."""
_FIRST_EPOCH = 1000
"""Above those of the items that are written beside bare nats-py."""
_END = b"end"


class Turn(NamedTuple):
    """What one turn saw; processor time is in microseconds an item."""

    per_second: float
    writer_us: float
    ack_ms: float
    servers_us: float
    reader_us: float
    """Of one reader, the mean of all."""


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("durable_log", __doc__)
    add = report.parser.add_argument
    add("--rounds", type=int, default=5, metavar="N", help="turns of each (5)")
    add("--seconds", type=float, default=1.0, metavar="S", help="how long a turn takes (1)")
    add("--size", type=int, default=20_000, metavar="BYTES", help="of a message or an item (20,000)")
    add("--pace", type=int, default=300, metavar="N", help="items a second where it is not full (300)")
    options = report.parse(arguments)
    rounds, seconds = (1, 0.1) if options.quick else (options.rounds, options.seconds)
    given = rounds, seconds, [os.urandom(options.size) for _ in range(16)]
    report.say(f"{rounds} rounds of {seconds:g} s in turn, {options.size:,} bytes a message or item, medians.")
    readers: list[Row] = []
    try:
        for replicas in _REPLICAS:
            with tempfile.TemporaryDirectory(prefix="tb-log-") as folder, _started(Path(folder), replicas) as servers:
                if replicas == _REPLICAS[0]:
                    report.table(asyncio.run(_beside_bare(servers, *given)), "beside bare nats-py")
                readers += asyncio.run(_cost_of_readers(servers, *given, paces=(options.pace, 0)))
    except (NotRunError, WrongDeliveryError, LogError) as error:
        report.fail(error)
    report.table(readers, "readers; processor time in microseconds an item")
    report.write()


@contextmanager
def _started(folder: Path, count: int) -> Iterator[list[NatsServer]]:
    if count > 1:
        with cluster(folder, count) as servers:
            yield servers
        return
    server = NatsServer(folder, f"jetstream {{ store_dir: '{folder}/js' }}\n")
    try:
        yield [server]
    finally:
        server.kill()


def _settings(servers: Sequence[NatsServer]) -> Settings:
    return Settings.load(
        environment={},
        overrides={
            "durable_log.address": f"nats://{','.join(each.server for each in servers)}/log",
            "durable_log.replicas": len(servers),
            "durable_log.max_bytes": 1_000_000_000,
            "bus.heartbeat_timeout_ms": 60_000,  # the servers may take as long to elect a leader
        },
    )


class _Source:
    """One life of a worker, whose items are written."""

    def __init__(self, writer: LogWriter, settings: Settings, epoch: int, payloads: Sequence[bytes]) -> None:
        self.items = 0
        self._writer, self._payloads = writer, payloads
        self._epoch, self._hello = epoch, hello_of(settings, 1000, HandoffPoint())
        self._room = asyncio.Semaphore(_IN_FLIGHT)

    async def write(self, seconds: float, pace: float = 0) -> float:
        began, before = time.perf_counter(), self.items
        while (now := time.perf_counter()) < began + seconds:
            if pace and (wait := began + (self.items - before) / pace - now) > 0:
                await asyncio.sleep(wait)
            await self.put(self._payloads[self.items % len(self._payloads)])
        for _ in range(_IN_FLIGHT):  # all items are in the log
            await self._room.acquire()
        for _ in range(_IN_FLIGHT):
            self._room.release()
        return (self.items - before) / (time.perf_counter() - began)

    async def put(self, payload: bytes) -> None:
        await self._room.acquire()
        self.items += 1
        kind = PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH
        item = StreamItem(self._hello, self._epoch, self.items, kind, payload)
        self._writer.take(item, self._room.release)


async def _beside_bare(
    servers: Sequence[NatsServer], rounds: int, seconds: float, payloads: Sequence[bytes]
) -> list[Row]:
    settings = _settings(servers)
    connection = await nats.connect([f"nats://{each.server}" for each in servers])
    jetstream = connection.jetstream()
    found: dict[str, list[float]] = {"bare": [], "log": []}
    acks: list[float] = []
    try:
        async with LogWriter(LogStream(settings), settings, drain_seconds=60) as writer:  # waits for the cluster
            await jetstream.add_stream(StreamConfig(name="bare", subjects=["bare"], num_replicas=len(servers)))
            for number in range(rounds):
                progress(f"beside bare nats-py, round {number + 1} of {rounds}")
                bare = _bare(jetstream, payloads, seconds, acks)
                ours = _Source(writer, settings, number + 1, payloads).write(seconds)
                for name, turn in (("bare", bare), ("log", ours))[:: 1 if number % 2 == 0 else -1]:
                    found[name].append(await turn)
            counts = writer.counts
    finally:
        await connection.close()
    share = median(log / bare for log, bare in zip(found["log"], found["bare"], strict=True))
    return [
        {
            "": f"bare nats-py, {_IN_FLIGHT} messages in flight",
            "a second": median(found["bare"]),
            "ack ms": median(acks) * 1e3,
        },
        {
            "": f"durable log, {counts.items / counts.messages:.1f} items a message",
            "a second": median(found["log"]),
            "ack ms": counts.write_seconds / counts.messages * 1e3,
            "of bare nats-py": share,
        },
    ]


async def _bare(jetstream: JetStreamContext, payloads: Sequence[bytes], seconds: float, acks: list[float]) -> float:
    """Publish by nats-py alone for a while; return how many messages a second were acknowledged."""
    began, done = time.perf_counter(), 0

    async def publish() -> None:
        nonlocal done
        while (sent := time.perf_counter()) < began + seconds:
            await jetstream.publish("bare", payloads[done % len(payloads)])
            acks.append(time.perf_counter() - sent)
            done += 1

    await asyncio.gather(*(publish() for _ in range(_IN_FLIGHT)))
    return done / (time.perf_counter() - began)


async def _cost_of_readers(
    servers: Sequence[NatsServer], rounds: int, seconds: float, payloads: Sequence[bytes], paces: Sequence[int]
) -> list[Row]:
    """Return for each pace and number of readers what the writer's rate and costs were."""
    settings = _settings(servers)
    found: dict[tuple[int, str], list[Turn]] = {(pace, name): [] for pace in paces for name in _READERS}
    epoch = _FIRST_EPOCH
    with ExitStack() as stack:
        readers = [stack.enter_context(Child()) for _ in range(max(_READERS.values()))]
        async with LogWriter(LogStream(settings), settings, drain_seconds=60) as writer:
            for number in range(rounds):
                progress(f"readers, {len(servers)} replica(s), round {number + 1} of {rounds}")
                for pace, name in list(found)[:: 1 if number % 2 == 0 else -1]:
                    epoch += 1
                    source, since = _Source(writer, settings, epoch, payloads), time.time()
                    reading = readers[: _READERS[name]]
                    for reader in reading:
                        reader.begin(read, settings.durable_log.address, epoch, since)
                    found[pace, name].append(await _turn(writer, source, reading, servers, seconds, pace))
    return [_row(len(servers), pace, name, turns, found[pace, _BASE]) for (pace, name), turns in found.items()]


async def _turn(  # noqa: PLR0913, PLR0917 - all that takes part
    writer: LogWriter, source: _Source, readers: Sequence[Child], servers: Sequence[NatsServer], seconds: float,
    pace: int,
) -> Turn:  # fmt: skip
    def used() -> list[float]:
        counts = writer.counts
        of_servers = sum(processor_seconds(each.process.pid) for each in servers)
        return [counts.messages, counts.write_seconds, time.process_time(), of_servers]

    await source.put(b"begin")
    for reader in readers:
        await asyncio.to_thread(reader.answer)
    before = used()
    rate = await source.write(seconds, pace)
    messages, writing, spent, of_servers = (after - early for after, early in zip(used(), before, strict=True))
    items = source.items
    await source.put(_END)
    results = [await asyncio.to_thread(reader.answer) for reader in readers]
    if any(count != items for count, _ in results):
        raise WrongDeliveryError(f"{items} items were written, readers got {[count for count, _ in results]}")
    of_readers = sum(cpu for _, cpu in results) / len(results)
    micro = 1e6 / (items - 1)
    return Turn(rate, spent * micro, writing / messages * 1e3, of_servers * micro, of_readers * micro)


def read(connection: Connection, address: str, epoch: int, since: float) -> tuple[int, float]:
    """Read a worker's life from a time on, up to an item with the payload END; return the items, and what they cost."""
    return asyncio.run(_read(connection, address, epoch, datetime.fromtimestamp(since, UTC)))


async def _read(connection: Connection, address: str, epoch: int, since: datetime) -> tuple[int, float]:
    items, cpu = 0, 0.0
    async with aclosing(read_log(address, since=since, follow=True)) as log:
        async for item in log:
            if item.epoch != epoch:
                continue
            if item.payload == _END:
                break
            if not items:
                cpu = time.process_time()
                connection.send("ready")
            items += 1
    return items, time.process_time() - cpu


def _row(replicas: int, pace: int, name: str, turns: Sequence[Turn], base: Sequence[Turn]) -> Row:
    pairs = list(zip(turns, base, strict=True))
    rate = median(one.per_second / other.per_second for one, other in pairs)
    cost = median(one.writer_us / other.writer_us for one, other in pairs)
    return {
        "replicas": replicas,
        "pace": pace or "full",
        "readers": name,
        **{field: median(getattr(each, field) for each in turns) for field in Turn._fields},
        "rate, of one reader's": rate,
        "writer's time, of one reader's": cost,
    }


if __name__ == "__main__":
    main()
