"""A log restored from a backup, or made anew: writers go on behind its items, and readers learn which are missing."""

import json
from contextlib import aclosing
from typing import Any

import pytest
from nats.aio.client import Client

from tests.recordings.durable_log import using as log
from tests.support.nats import NatsServer
from tests.support.waiting import soon, until
from tokenbus.recordings.durable_log.reader import read_log
from tokenbus.recordings.durable_log.stream import LogError, LogStream


async def api(client: Client, what: str, **asked: object) -> dict[str, Any]:
    answer = await client.request(f"$JS.API.STREAM.{what}", json.dumps(asked).encode() if asked else b"")
    found: dict[str, Any] = json.loads(answer.data)
    assert "error" not in found, found
    return found


async def backup(client: Client, name: str) -> tuple[dict[str, Any], list[bytes]]:
    """Take a backup, as `nats stream backup` does: the state of the stream, and its contents."""
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    found = await api(client, f"SNAPSHOT.{name}", deliver_subject=inbox)
    chunks: list[bytes] = []
    while True:
        message = await soon(subscription.next_msg(timeout=None))
        if not message.data:
            return found, chunks
        chunks.append(message.data)
        if message.reply:
            await client.publish(message.reply)


async def restore(client: Client, name: str, found: dict[str, Any], chunks: list[bytes]) -> None:
    begun = await api(client, f"RESTORE.{name}", config=found["config"], state=found["state"])
    for chunk in (*chunks, b""):
        answer = await client.request(begun["deliver_subject"], chunk)
    assert "error" not in json.loads(answer.data)


async def test_position_of_a_log_that_was_made_anew_is_an_error(server: NatsServer) -> None:
    settings = log.log_settings(server)
    connection = await LogStream(settings).connect()
    async with log.writer_of(settings) as writer:
        await log.write(writer, [1])
        await log.written(writer)
        await log.write(writer, [2])
    first, last = await log.read(settings)
    async with aclosing(read_log(settings=settings, follow=True)) as items:
        assert [(await soon(anext(items))).sequence for _ in range(2)] == [1, 2]
        await api(connection.client, f"DELETE.tokenbus-{server.log}")
        async with log.writer_of(settings) as writer:
            for sequence in range(3, 9):
                await log.write(writer, [sequence])
                await log.written(writer)
        with pytest.raises(LogError, match=f"position {last.position}: the log was recreated, and now has another"):
            await soon(anext(items))
    for position in (first.position, last.position):
        with pytest.raises(LogError, match="the log was recreated"):
            await log.read(settings, after=position)
    await connection.close()


async def test_log_goes_on_behind_a_backup(server: NatsServer) -> None:
    settings = log.log_settings(server)
    connection = await LogStream(settings).connect()
    async with log.writer_of(settings) as writer:
        await log.write(writer, range(1, 6))
        await log.written(writer)
        found, chunks = await soon(backup(connection.client, f"tokenbus-{server.log}"))
        await log.write(writer, [6])
        await log.written(writer)
        await log.write(writer, [7])
    first, *_, last = await log.read(settings)
    await api(connection.client, f"DELETE.tokenbus-{server.log}")
    await soon(restore(connection.client, f"tokenbus-{server.log}", found, chunks))
    await connection.close()
    with pytest.raises(LogError, match="is beyond the log's end"):
        await log.read(settings, after=last.position)
    assert [item.sequence for item in await log.read(settings, after=first.position)] == [2, 3, 4, 5]
    async with log.writer_of(settings) as one, log.writer_of(settings) as other:
        await log.write(one, range(3, 7))
        await until(lambda: not one.unwritten_items)
        await log.write(other, [9])
    items = await log.read(settings)
    assert log.numbered(items) == [*log.whole(6), (9, 2)]
