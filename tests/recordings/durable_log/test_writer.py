"""A log has each item once and in order, with any number of writers, and whichever process or server dies."""

import asyncio
from contextlib import AsyncExitStack, suppress

import pytest

from tests.cli.helpers import EPOCH, hello, payloads
from tests.recordings.durable_log import using as log
from tests.support.nats import NatsServer
from tests.support.waiting import soon, until
from tokenbus.bus import AddressError
from tokenbus.recordings.durable_log.stream import LogError, LogStream
from tokenbus.recordings.durable_log.writer import LogWriter
from tokenbus.settings import Settings


async def test_log_has_each_item_as_it_was_published(server: NatsServer) -> None:
    await log.filled(server, log.STREAM)
    found = await log.read(log.log_settings(server))
    assert [(item.sequence, item.kind, item.payload) for item in found] == list(payloads())
    assert {(item.worker_id, item.epoch, item.schema_version) for item in found} == {("worker-0", EPOCH, "1.0")}


async def test_two_writers_write_nothing_twice(server: NatsServer) -> None:
    settings = log.log_settings(server, durable_log__message_bytes=2000)
    async with log.writer_of(settings) as one, log.writer_of(settings) as other:
        for sequence in range(1, 501):
            await log.write(one, [sequence])
            await log.write(other, [sequence])
            await asyncio.sleep(0)
    assert log.sequences(await log.read(settings)) == list(range(1, 501))
    assert one.counts.items + other.counts.items == 500
    assert one.counts.missing_items + other.counts.missing_items == 0


async def test_restarted_writer_goes_on_where_the_log_ends(server: NatsServer) -> None:
    settings = log.log_settings(server, durable_log__message_bytes=1000)
    with suppress(ZeroDivisionError):
        async with log.writer_of(settings) as writer:
            await log.write(writer, range(1, 301))
            await until(lambda: writer.counts.items)
            raise ZeroDivisionError  # it ends without a drain
    assert 0 < len(await log.read(settings)) <= 300
    async with log.writer_of(settings) as second:
        await log.write(second, range(1, 401))
    assert log.sequences(await log.read(settings)) == list(range(1, 401))
    assert second.counts.missing_items == 0


async def test_missing_items_are_named(server: NatsServer) -> None:
    settings = log.log_settings(server)
    async with log.writer_of(settings) as writer:
        await log.write(writer, [3, 4, 9])
        await log.written(writer)
        await log.write(writer, [2, 3], log.Life(EPOCH + 1, hello()))
    found = [(item.epoch - EPOCH, item.sequence, item.missing_items) for item in await log.read(settings)]
    assert found == [(0, 3, 2), (0, 4, 0), (0, 9, 4), (1, 2, 1), (1, 3, 0)]
    assert (writer.counts.missing_items, writer.counts.already_there) == (7, 0)


async def test_late_items_of_an_earlier_life_are_written(server: NatsServer) -> None:
    settings = log.log_settings(server)
    async with log.writer_of(settings) as one, log.writer_of(settings) as other:
        await log.write(one, [1, 2])
        await until(lambda: not one.unwritten_items)
        await log.write(other, [1], log.Life(EPOCH + 1, hello()))
        await until(lambda: not other.unwritten_items)
        await log.write(one, [3])
        await until(lambda: not one.unwritten_items)
        await log.write(other, [2, 3])  # of the first life, too
    found = [(item.epoch - EPOCH, item.sequence, item.missing_items) for item in await log.read(settings)]
    assert found == [(0, 1, 0), (0, 2, 0), (1, 1, 0), (0, 3, 0)]
    assert (one.counts.items, one.counts.already_there, one.counts.missing_items) == (3, 0, 0)
    assert (other.counts.items, other.counts.already_there, other.counts.missing_items) == (1, 2, 0)


async def test_what_one_writer_has_not_another_may_bring(server: NatsServer) -> None:
    settings = log.log_settings(server)
    async with log.writer_of(settings, wait_seconds=60) as late, log.writer_of(settings) as other:
        await log.write(late, [5, 6])
        await until(lambda: late.unwritten_items == 2)
        await log.write(other, range(1, 7))
        await until(lambda: not late.unwritten_items)
    assert log.numbered(await log.read(settings)) == log.whole(6)


async def test_what_was_left_out_is_not_waited_for(server: NatsServer) -> None:
    settings = log.log_settings(server)
    async with log.writer_of(settings, wait_seconds=3600) as writer:
        await log.write(writer, [1])
        for sequence in (2, 3):
            writer.skip(log.STREAM.item(sequence))
        await log.write(writer, [4])
        await log.written(writer)
    assert log.numbered(await log.read(settings)) == [(1, 0), (4, 2)]


async def test_retention_is_by_bytes(server: NatsServer) -> None:
    small = log.log_settings(
        server, limits__max_message_bytes=50_000, durable_log__max_bytes=50_000, durable_log__message_bytes=1000
    )
    async with log.writer_of(small) as writer:
        await log.write(writer, range(1, 1001))
    found = await log.read(small)
    assert 0 < sum(len(item.payload) for item in found) < 50_000
    assert log.sequences(found) == list(range(1001 - len(found), 1001))


async def test_log_that_exists_stays_as_it_was_made(server: NatsServer, caplog: pytest.LogCaptureFixture) -> None:
    large = log.log_settings(server, durable_log__max_bytes=3_000_000_000, durable_log__max_age_hours=300)
    less = "log keeps less than the settings say"
    async with log.writer_of(large), log.writer_of(log.log_settings(server)) as other:
        await log.write(other, [1])
    assert less not in caplog.text
    larger = log.log_settings(server, durable_log__max_bytes=4_000_000_000, durable_log__max_age_hours=301)
    async with log.writer_of(larger) as other:
        await log.write(other, range(1, 3))
    config = await log.kept(large)
    assert (config.max_bytes, config.max_age) == (3_000_000_000, 300 * 3600)
    assert caplog.text.count(less) == 1
    assert f"durable_log.max_bytes is 4000000000, the stream tokenbus-{server.log} has 3000000000" in caplog.text
    assert f"durable_log.max_age_hours is 301, the stream tokenbus-{server.log} has 300" in caplog.text
    assert log.sequences(await log.read(large)) == [1, 2]


async def test_writers_that_make_a_log_at_once_share_it(server: NatsServer) -> None:
    chosen = [log.log_settings(server, durable_log__max_age_hours=hours) for hours in range(1, 9)]
    async with AsyncExitStack() as stack:
        entering = [stack.enter_async_context(log.writer_of(settings)) for settings in chosen]
        for writer in await soon(asyncio.gather(*entering)):
            await log.write(writer, [1, 2])
    assert log.sequences(await log.read(chosen[0])) == [1, 2]


async def test_item_that_is_too_large_is_refused_and_named(
    server: NatsServer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = log.log_settings(server)
    async with log.writer_of(settings) as writer:
        await log.write(writer, [1])
        await log.write(writer, [2], payload=b"x" * 2**20)
        await log.write(writer, [3])
    assert log.numbered(await log.read(settings)) == [(1, 0), (3, 1)]
    assert writer.counts.refused_items == 1
    assert f"most={2**20 - 1024}" in caplog.text + capfd.readouterr().err


async def test_log_that_was_deleted_is_made_again_once_it_can_be(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    settings = log.log_settings(server)
    async with log.writer_of(settings) as writer:
        await log.write(writer, [1])
        await log.written(writer)
        connection = await LogStream(settings).connect()
        jetstream = connection.client.jetstream()
        await jetstream.delete_stream(f"tokenbus-{server.log}")
        await jetstream.add_stream(name="other", subjects=[f"tokenbus.{server.log}.>"])
        await log.write(writer, [2])
        await until(lambda: writer.counts.failed_writes)
        await jetstream.delete_stream("other")
        await log.written(writer)
        await connection.close()
    assert log.numbered(await log.read(settings)) == [(2, 1)]
    assert caplog.text.count("log was made anew") == 1


async def entered(settings: Settings) -> LogWriter:
    async with log.writer_of(settings) as writer:
        return writer


async def test_what_keeps_a_log_from_being_written_is_one_line(server: NatsServer) -> None:
    with pytest.raises(
        LogError, match=r"nats://.*/log-.*: jetstream: replicas > 1 not supported in non-clustered mode"
    ):
        await entered(log.log_settings(server, durable_log__replicas=3))
    with pytest.raises(AddressError, match=r"x://y/log: expected nats://HOST:PORT/NAME"):
        await entered(log.log_settings(server, durable_log__address="x://y"))
    server.kill()
    server._config = ""
    server.start()
    settings = log.log_settings(server)
    with pytest.raises(LogError, match="the server has no JetStream, or this user may not use it"):
        await entered(settings)
    server.kill()
    with pytest.raises(AddressError, match=r"no server answers within 0\.1 s: "):
        await LogWriter(LogStream(settings), settings).open(LogError, 0.1)
