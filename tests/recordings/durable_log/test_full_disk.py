"""A disk that is full: tokens go on, nothing that can be kept is lost, and once there is room all goes on by itself."""

import asyncio
import contextlib
import http.client
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.metrics.running import Bus
from tests.recordings.durable_log.using import health, logging_to, numbered, read, told, whole
from tests.support.nats import NatsServer
from tests.support.nats_cluster import cluster, until_ready
from tests.support.small_disk import why_no_small_disk
from tests.support.waiting import MOST, until


@asynccontextmanager
async def supervised(nodes: list[NatsServer]) -> AsyncIterator[None]:
    """Start servers again that have ended or fail their liveness probe, as a supervisor does."""

    def supervise(node: NatsServer) -> None:
        if node.process.poll() is None and _answers(node.monitor, "/healthz?js-enabled-only=true"):
            return
        node.kill()
        with contextlib.suppress(AssertionError):  # it does not start while its disk is full
            node.start()

    async def supervise_all() -> None:
        while True:
            for node in nodes:
                await asyncio.to_thread(supervise, node)
            await asyncio.sleep(0.1)

    supervising = asyncio.create_task(supervise_all())
    yield
    supervising.cancel()
    await asyncio.gather(supervising, return_exceptions=True)


def _answers(monitor: str, path: str) -> bool:
    try:
        with closing(http.client.HTTPConnection(monitor, timeout=MOST)) as connection:
            connection.request("GET", path)
            return connection.getresponse().status == HTTPStatus.OK
    except OSError:
        return False


@pytest.mark.nightly
async def test_full_disks_of_a_durable_log_lose_nothing(tmp_path: Path) -> None:
    """All three disks are full: no request ends for that, and once there is room all is acked, and all is in the log.

    A NATS server that found no room takes nothing until it starts again, so its supervisor has to notice that.
    """
    if reason := why_no_small_disk(tmp_path):
        pytest.skip(reason)
    with cluster(tmp_path, limit=", max_file_store: 1GB", disk_bytes=8_000_000) as nodes:
        chosen = logging_to(*nodes, durable_log__durable=True, durable_log__max_bytes=100_000_000)
        await until_ready(chosen)
        bus = Bus(chosen)
        async with asyncio.timeout(3 * MOST), bus.running():
            await bus.serve(requests=1, tokens=6)
            await until(lambda: not bus.publisher.retention)
            for node in nodes:
                assert node.disk is not None
                node.disk.fill()
            async with supervised(nodes):
                while not told(bus.processor)("log_failed_messages_total"):
                    await bus.serve(requests=1, tokens=90)
                await until(lambda: health(bus.processor).outside)
                assert not health(bus.processor).is_ready
                assert bus.publisher.retention
                for node in nodes:
                    assert node.disk is not None
                    node.disk.make_room()
                await until(lambda: not bus.publisher.retention)
                await until(lambda: health(bus.processor).is_ready)
                await bus.serve(requests=1, tokens=6)
                await until(lambda: not bus.publisher.retention)
                items = await read(chosen)
        assert numbered(items) == whole(bus.publisher.retention.next_sequence - 1)
