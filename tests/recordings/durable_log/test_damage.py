"""Messages of other programs in a log's stream repeat no item and stop no reader; damaged ones are logged."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import pytest
from nats.js import JetStreamContext

from tests.cli.helpers import BATCH, EPOCH, hello
from tests.recordings.durable_log import using as log
from tests.support.nats import NatsServer
from tests.support.waiting import soon
from tokenbus.recordings.durable_log.reader import read_log
from tokenbus.recordings.durable_log.server import ServerConnection
from tokenbus.recordings.durable_log.stream import LogError, LogStream
from tokenbus.recordings.items import gap_entry, hello_entry, item_entry
from tokenbus.settings import Settings

OTHER = log.Life(EPOCH, hello("worker-1"))


def message(first: int, last: int, epoch: int = EPOCH, worker_id: str = "worker-0") -> bytes:
    parts = [item_entry(epoch, sequence, BATCH, b"x" * 100) for sequence in range(first, last + 1)]
    return hello_entry(epoch, hello(worker_id), first) + b"".join(parts)


@asynccontextmanager
async def stream_of(settings: Settings) -> AsyncIterator[tuple[ServerConnection, JetStreamContext]]:
    connection = await LogStream(settings).connect()
    yield connection, connection.client.jetstream()
    await connection.close()


async def append(settings: Settings, data: bytes, life: log.Life = log.STREAM, **headers: str) -> None:
    """Append a message under a life's subject, as another program would that may write there."""
    subject = LogStream(settings).subject(life.hello.worker_id, life.epoch)
    async with stream_of(settings) as (_, jetstream):
        await jetstream.publish(subject, data, headers=headers or None)


async def test_item_that_is_appended_twice_is_given_once(server: NatsServer) -> None:
    settings = log.log_settings(server)
    async with log.writer_of(settings) as writer:
        await log.write(writer, range(1, 11))
        await log.write(writer, range(1, 4), OTHER)
    for first, last in ((1, 10), (1, 5), (8, 12), (11, 13), (3, 3)):
        await append(settings, message(first, last))
    found = await log.read(settings)
    assert log.sequences(item for item in found if item.worker_id == "worker-0") == list(range(1, 14))
    assert log.sequences(item for item in found if item.worker_id == "worker-1") == [1, 2, 3]
    assert not any(item.missing_items for item in found)
    tenth = next(item for item in found if item.sequence == 10)
    behind = await log.read(settings, after=tenth.position, worker_id="worker-0")
    assert log.sequences(behind) == [11, 12, 13]


@pytest.mark.parametrize("between", [message(3, 3), b"damaged"])
async def test_item_is_not_new_behind_others_that_were_appended(server: NatsServer, between: bytes) -> None:
    settings = log.log_settings(server)
    async with log.writer_of(settings) as writer:
        await log.write(writer, range(1, 11))
        await log.written(writer)
    await append(settings, between)
    async with log.writer_of(settings) as writer:
        await log.write(writer, range(1, 4), OTHER)
    *_, last = await log.read(settings)
    assert last.worker_id == "worker-1"
    await append(settings, between)
    await append(settings, message(4, 12))
    await append(settings, between)
    async with log.writer_of(settings) as writer:
        await log.write(writer, range(8, 15))
        await log.written(writer)
        assert writer.counts.already_there == 5
    found = await log.read(settings, after=last.position, worker_id="worker-0")
    assert log.numbered(found) == [(11, 0), (12, 0), (13, 0), (14, 0)]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[: len(data) // 2],
    "a bit flipped": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "nothing": lambda _: b"",
    "noise": lambda _: bytes(range(256)),
    "gap that ends before it begins": lambda _: hello_entry(EPOCH, hello(), 4) + gap_entry(EPOCH, 4, 2),
    "of another epoch": lambda _: message(4, 6, epoch=EPOCH + 1),
    "of another worker": lambda _: message(4, 6, worker_id="worker-1"),
}
damaged = pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)


@damaged
async def test_damaged_message_is_named_and_passed_over(
    server: NatsServer, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    """At the beginning, in the middle and at the end: the next item of the life has the number of those missing."""
    settings = log.log_settings(server)
    async with log.writer_of(settings):
        pass
    await append(settings, damage(message(1, 3)))
    await append(settings, message(4, 5))
    await append(settings, damage(message(6, 8)), Status="404")
    await append(settings, message(9, 10))
    await append(settings, damage(message(11, 12)))
    found = await log.read(settings)
    assert log.numbered(found) == [(4, 3), (5, 0), (9, 3), (10, 0)]
    assert {(item.worker_id, item.epoch) for item in found} == {("worker-0", EPOCH)}
    lines = [each.getMessage() for each in caplog.records if "damaged message" in each.getMessage()]
    assert [f"message={number} " in line for number, line in zip((1, 3, 5), lines, strict=True)] == [True] * 3


@damaged
async def test_damage_stops_no_writer(server: NatsServer, damage: Callable[[bytes], bytes]) -> None:
    settings = log.log_settings(server)
    async with log.writer_of(settings) as writer:
        await log.write(writer, range(1, 4))
        await log.written(writer)
        await append(settings, damage(message(100, 200)))
        await log.write(writer, range(4, 6))
        await log.written(writer)
    async with log.writer_of(settings) as writer:
        await append(settings, damage(message(100, 200)))
        await log.write(writer, range(1, 8))
    assert log.numbered(await log.read(settings)) == log.whole(7)


@pytest.mark.parametrize(
    "headers", [b"NATS/1.0\r\nbroken\r\n\r\n", b"?", b"NATS/1.0 404 \xff\r\n\r\n", b"NATS/1.0\r\n\xff: \0"]
)
async def test_broken_headers_stop_nobody(server: NatsServer, headers: bytes) -> None:
    settings = await log.log_with(server, range(1, 4))
    reader, sender = await asyncio.open_connection("127.0.0.1", server.port)
    sender.write(b'CONNECT {"verbose": false, "headers": true}\r\n')
    for body, worker_id in ((message(4, 6), "worker-0"), (message(1, 3, worker_id="worker-1"), "worker-1")):
        subject = LogStream(settings).subject(worker_id, EPOCH).encode()
        sender.write(b"HPUB %s %d %d\r\n" % (subject, len(headers), len(headers + body)) + headers + body + b"\r\n")
    sender.write(b"PING\r\n")
    await soon(reader.readuntil(b"PONG"))
    sender.close()
    async with log.writer_of(settings) as writer:
        await log.write(writer, range(1, 8))
        await log.write(writer, range(1, 5), OTHER)
    found = [(item.worker_id, item.sequence, item.missing_items) for item in await log.read(settings)]
    assert sorted(found) == [("worker-0", n, 0) for n in range(1, 8)] + [("worker-1", n, 0) for n in range(1, 5)]


async def test_position_beyond_the_end_is_an_error(server: NatsServer) -> None:
    settings = log.log_settings(server)
    await log.filled(server, log.STREAM)
    *_, last = await log.read(settings)
    number, item, time = last.position.split(".")
    assert await log.read(settings, after=last.position) == []
    for follow in (False, True):
        beyond = f"{int(number) + 1}.1.1"
        with pytest.raises(LogError, match=rf"position {beyond} is beyond the log's end, message {number}$"):
            await log.read(settings, after=beyond, follow=follow)
        with pytest.raises(LogError, match=rf"is beyond the end of message {number}, which has {item} items$"):
            await log.read(settings, after=f"{number}.{int(item) + 1}.{time}", follow=follow)


async def test_log_that_begins_anew_is_an_error_to_who_follows(server: NatsServer) -> None:
    settings = await log.log_with(server, range(1, 4))
    async with aclosing(read_log(settings=settings, follow=True)) as items:
        for _ in range(3):
            await soon(anext(items))
        waiting = asyncio.create_task(anext(items))
        async with stream_of(settings) as (_, jetstream):
            await jetstream.delete_stream(f"tokenbus-{server.log}")
            await jetstream.add_stream(name=f"tokenbus-{server.log}", subjects=[f"tokenbus.{server.log}.*.*"])
        server.kill()
        server.start()
        with pytest.raises(LogError, match="is beyond the log's end"):
            await soon(waiting)


async def test_message_that_the_reader_was_not_sent_is_fetched_again(server: NatsServer) -> None:
    settings = log.log_settings(server, durable_log__message_bytes=200)
    stolen = 0
    async with log.writer_of(settings) as writer, stream_of(settings) as (connection, jetstream):
        await log.write(writer, [1])
        async with aclosing(read_log(settings=settings, follow=True)) as items:
            found = [await soon(anext(items))]
            (consumer,) = await jetstream.consumers_info(f"tokenbus-{server.log}")
            inbox = connection.client.new_inbox()
            subscription = await connection.client.subscribe(inbox)
            ask = f"$JS.API.CONSUMER.MSG.NEXT.tokenbus-{server.log}.{consumer.name}"
            await connection.client.publish(ask, b'{"batch": 3}', reply=inbox)
            await connection.client.flush()
            for number in range(2, 12):
                await log.write(writer, [number])
                await log.written(writer)
            while stolen < 3:
                stolen += bool((await soon(subscription.next_msg(timeout=None))).data)
            while found[-1].sequence < 11:
                found.append(await soon(anext(items)))
    assert log.numbered(found) == log.whole(11)
