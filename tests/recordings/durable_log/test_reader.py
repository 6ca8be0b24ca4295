"""Each reader of a log has its own position: the beginning, a time, behind an item, or a request."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.cli.helpers import hello, payloads
from tests.pages import blocks
from tests.recordings.durable_log import using as log
from tests.support.nats import NatsServer
from tests.support.waiting import soon, until
from tokenbus.recordings.durable_log import reader
from tokenbus.recordings.durable_log.reader import read_log
from tokenbus.recordings.durable_log.stream import LogStream
from tokenbus.recordings.items import StreamItem
from tokenbus.settings import Settings


async def test_reader_goes_on_behind_any_position(server: NatsServer) -> None:
    settings = await log.log_with(server, range(1, 41), durable_log__message_bytes=1000)
    found = await log.read(settings)
    for item in found[::7]:
        assert log.sequences(await log.read(settings, after=item.position)) == list(range(item.sequence + 1, 41))
    with pytest.raises(ValueError, match="after: expected the position of an item of a log, got 'x'"):
        await log.read(settings, after="x")


async def test_reader_begins_at_a_time(server: NatsServer) -> None:
    settings = await log.log_with(server, range(1, 5))
    async with log.writer_of(settings) as writer:
        await log.write(writer, range(5, 8))
    fifth = (await log.read(settings))[4]
    assert log.sequences(await log.read(settings, since=fifth.logged_at)) == [5, 6, 7]
    assert await log.read(settings, since=datetime.now(UTC) + timedelta(hours=1)) == []


async def test_reader_finds_a_request(server: NatsServer) -> None:
    settings = log.log_settings(server)
    await log.filled(server, log.STREAM)
    found = await log.read(settings, request_id=2)
    tokens = [
        token
        for item in found
        if item.batch
        for row in item.batch.rows()
        if row.request_id == 2
        for token in row.token_ids
    ]
    assert len(tokens) == 9
    assert found[0].event is not None
    assert found[0].event.admitted.request_id == 2
    assert await log.read(settings, request_id=99) == []


async def test_reader_takes_one_worker(server: NatsServer) -> None:
    settings, odd = log.log_settings(server), "a.b *>% é"
    async with log.writer_of(settings) as writer:
        await log.write(writer, [1, 2])
        await log.write(writer, [1], log.Life(7, hello(odd)))
    assert [item.worker_id for item in await log.read(settings, worker_id=odd)] == [odd]
    assert len(await log.read(settings)) == 3


async def test_reader_of_a_log_that_becomes_empty_ends(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_IDLE_SECONDS", 0.1)
    settings = log.log_settings(server, durable_log__message_bytes=1000)
    async with log.writer_of(settings) as writer:
        await log.write(writer, range(1, 2001))
        await log.written(writer)
        connection = await LogStream(settings).connect()
        async with aclosing(read_log(settings=settings)) as items:
            found = [await anext(items)]
            await connection.client.jetstream().purge_stream(f"tokenbus-{server.log}")
            found += await soon(collected(items))
        await connection.close()
    assert log.sequences(found) == list(range(1, len(found) + 1))
    assert len(found) < 2000


async def test_reader_that_retention_overtakes_is_told(server: NatsServer, caplog: pytest.LogCaptureFixture) -> None:
    settings = await log.log_with(server, range(1, 2001), durable_log__message_bytes=1000)
    connection = await LogStream(settings).connect()
    async with aclosing(read_log(settings=settings)) as items:
        found = [await anext(items)]
        await connection.client.jetstream().purge_stream(f"tokenbus-{server.log}", keep=3)
        found += await soon(collected(items))
    await connection.close()
    (overtaken,) = [place for place, item in enumerate(found) if item.missing_items]
    removed = found[overtaken].sequence - found[overtaken - 1].sequence - 1
    assert found[overtaken].missing_items == removed > 0
    assert found[-1].sequence == 2000
    assert "not read in time" not in caplog.text
    back = await log.read(settings, after=found[0].position)
    assert log.sequences(back) == log.sequences(found[overtaken:])
    assert "log was not read in time" in caplog.text
    assert await log.read(settings, after=found[-1].position) == []
    assert caplog.text.count("log was not read in time") == 1


async def test_what_is_missing_is_told_to_who_reads_one_request(server: NatsServer) -> None:
    settings = log.log_settings(server)
    async with log.writer_of(settings) as writer:
        await log.write(writer, [1, 5, 7])
        for sequence, kind, payload in payloads(requests=1, first=8):
            await writer.write(log.STREAM.item(sequence, kind, payload))
    first, *others = await log.read(settings, request_id=1)
    assert (first.sequence, first.missing_items) == (8, 4)
    assert others
    assert not any(item.missing_items for item in others)


async def collected(items: AsyncIterator[StreamItem]) -> list[StreamItem]:
    return [item async for item in items]


async def followed(settings: Settings, most: int, found: list[int] | None = None) -> list[int]:
    found = [] if found is None else found
    async with aclosing(read_log(settings=settings, follow=True)) as items:
        async for item in items:
            found.append(item.sequence)
            if len(found) == most:
                break
    return found


async def test_any_number_of_readers_follow_a_log_whose_server_is_killed(server: NatsServer) -> None:
    """Also where the writer's messages were on their way: each item is written and read once."""
    settings = log.log_settings(server, durable_log__message_bytes=1000)
    async with log.writer_of(settings) as writer:
        read_by: list[list[int]] = [[], [], []]
        reading = [asyncio.create_task(followed(settings, 900, found)) for found in read_by]
        for begin in (1, 301, 601):
            await log.write(writer, range(begin, begin + 300))
            await until(lambda begin=begin: writer.counts.items > begin and all(read_by))  # type: ignore[misc]
            server.kill()
            server.start()
        for each in reading:
            assert await soon(each) == list(range(1, 901))


async def test_reader_that_is_stopped_or_loses_its_server_leaves_no_exception_behind(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    settings, read_by = log.log_settings(server), [list[int](), list[int]()]
    async with log.writer_of(settings) as writer:
        await log.write(writer, range(1, 11))
        reading = [asyncio.create_task(followed(settings, 20, found)) for found in read_by]
        await until(lambda: all(len(found) == 10 for found in read_by))  # they wait for what comes next
        server.kill()
        server.start()
        await until(lambda: caplog.text.count("log is read again") >= 2)
        for each in reading:
            each.cancel()
        await asyncio.wait(reading)
        del reading, each
    gc.collect()
    await asyncio.sleep(0)
    assert not errors


async def test_page_reads_a_log(server: NatsServer, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (each for each in blocks("python") if each.page == "docs/log.md")
    names: dict[str, Any] = {}
    exec(block.text, names)  # noqa: S102 - it is on a page of ours
    await log.filled(server, log.STREAM)
    reading = asyncio.create_task(names["collect"](server.log_address, None))
    printed = ""

    def has_come() -> bool:
        nonlocal printed
        printed += capsys.readouterr().out
        return "worker-0 7" in printed

    await until(has_come)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
