"""The durable log that a processor keeps: promises that it refuses, and its counts."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from tests.metrics.running import Bus, settings
from tests.recordings.durable_log import using as log
from tests.support.nats import NatsServer
from tests.support.nats_cluster import cluster, until_ready
from tests.support.waiting import soon, until
from tokenbus.recordings.durable_log.item_log import ItemLog
from tokenbus.recordings.durable_log.stream import LogError
from tokenbus.settings import Settings, SettingsError


async def refusal(chosen: Settings) -> str:
    with pytest.raises(LogError) as refused:
        await soon(Bus(chosen).processor.__aenter__())
    return str(refused.value)


def test_promise_without_replicas_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"durable_log\.replicas: .*at least 3 with durable_log\.durable.*1"):
        settings(durable_log__address="nats://127.0.0.1:1/log", durable_log__durable=True, durable_log__replicas=1)
    with pytest.raises(SettingsError, match=r"durable_log\.address: needed with durable_log\.durable"):
        settings(durable_log__durable=True, durable_log__replicas=3)


@pytest.mark.nightly
async def test_promise_that_the_servers_cannot_keep_is_refused(server: NatsServer, tmp_path: Path) -> None:
    with cluster(tmp_path) as nodes:
        durable = partial(log.logging_to, *nodes, durable_log__durable=True)
        await until_ready(durable())
        limit = "8388608 bytes, needs a larger max_payload: this server's leaves 4193280"
        assert limit in await refusal(durable(limits__max_message_bytes=2**23))
        reason = await refusal(durable(durable_log__monitors=server.monitor))
        assert reason.endswith(f"the server at {server.monitor} has sync_interval 120 s, needed: always")
        waiting = Bus(durable(durable_log__monitors="127.0.0.1:1")).processor
        starting = asyncio.create_task(waiting.__aenter__())
        unknown = "the server at 127.0.0.1:1 has sync_interval unknown (ConnectionRefusedError"
        await until(lambda: waiting.item_log and unknown in waiting.item_log.problem)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        log.restarted(server, server._config.replace("}", ", sync_interval: always }", 1))
        async with Bus(durable(durable_log__monitors=server.monitor)).running():
            pass


async def test_item_that_another_processor_still_holds_is_not_missing(server: NatsServer) -> None:
    chosen = log.logging_to(server, **log.SMALL, bus__heartbeat_ms=60_000, bus__heartbeat_timeout_ms=180_000)
    first, second = [await ItemLog(chosen).open() for _ in range(2)]
    await log.write(first.writer, [1, 2])
    await log.written(first.writer)
    await log.write(second.writer, [5])
    for _ in range(5):  # while the second one could write it
        assert log.sequences(await log.read(chosen)) == [1, 2]
    await log.write(first.writer, [3, 4])
    await log.written(first.writer)
    await log.written(second.writer)
    for each in (first, second):
        await each.close()
        assert (each.writer.counts.missing_items, each.writer.counts.already_there) == (0, 0)
    assert log.numbered(await log.read(chosen)) == log.whole(5)


async def test_promise_that_a_single_server_cannot_keep_is_refused(server: NatsServer) -> None:
    chosen = log.logging_to(server, durable_log__durable=True, durable_log__replicas=3)
    assert "replicas > 1 not supported in non-clustered mode" in await refusal(chosen)
    async with log.writer_of(log.logging_to(server)):
        pass
    assert f"durable_log.replicas is 3, the stream tokenbus-{server.log} has 1" in await refusal(chosen)
