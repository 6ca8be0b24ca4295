"""Clients of the gateway that misbehave: each is answered or cut off, and no other client notices."""

import asyncio
import re

import pytest

from tests.support.waiting import soon, until
from tests.system.bytewise import alone, asked, connected, not_reading, serving
from tests.system.deployment import COMMAND, Deployment
from tests.system.inprocess import TCP
from tests.system.serving import error_of, plainly
from tokenbus.client import Client
from tokenbus.gateway import server
from tokenbus.processor import Processor

pytestmark = pytest.mark.xdist_group("gateway")


async def test_few_open_files_refuse_connections_and_nothing_else(deployment: Deployment) -> None:
    """A process that may open 256 files has room for 128 connections; those above are refused, and it goes on."""
    command = ["sh", "-c", 'ulimit -n 256 && exec "$0" gateway', COMMAND]
    program = deployment.start("gateway", command, gateway__address="127.0.0.1:0", gateway__max_requests=75)
    (url,) = re.findall(r"http://[^\"]+", await asyncio.to_thread(program.wait_for, '"listening"'))
    idle = []
    try:
        async with plainly(url) as client:
            assert (await client.get("/healthz")).status_code == 200
            idle.extend([await connected(url) for _ in range(127)])
            for _ in range(200):
                reader, writer = await connected(url)
                assert (await soon(reader.read())).startswith(b"HTTP/1.1 503 ")
                writer.close()
            assert (await client.get("/healthz")).status_code == 200
    finally:
        for _, writer in idle:
            writer.close()
    assert program.lines('"room":128')
    assert not program.lines("Too many open files")


async def test_stopping_gateway_cuts_off_who_does_not_read(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "LAST_SECONDS", 0.1)
    # However long the first takes to fill what may wait for it, the second must not get 408.
    async with serving(deployment, gateway__request_timeout_ms=3_600_000) as served:
        gateway = served.gateway
        stalled = [not_reading(served.address), not_reading(served.address, wanted=asked(max_tokens=1)[:-3])]
        await until(lambda: gateway.dispatcher.tokens and not len(gateway.dispatcher))
    for each in stalled:
        each.close()
    assert gateway.counts.cut_clients == 2
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_client_that_reads_late_is_told(deployment: Deployment) -> None:
    async with serving(deployment, gateway__stream_buffer_bytes=200_000) as served:
        stalled = not_reading(served.address, room=100_000)
        try:
            await until(lambda: served.gateway.dispatcher.tokens and not len(served.gateway.dispatcher))
            stalled.setblocking(False)  # noqa: FBT003 - the library's own
            data = b""
            while not data.endswith(b"0\r\n\r\n"):
                more = await soon(asyncio.get_running_loop().sock_recv(stalled, 1 << 20))
                assert more, data[-2000:]
                data += more
            events = data.decode().split("\n\n")
            assert "event: error\ndata: " in events[-2]
            error = error_of(events[-2].partition("data: ")[2])
            assert error["code"] == "slow_client"
            assert "bytes may wait for a client, which read too slowly" in error["message"]
        finally:
            stalled.close()


async def test_refused_gateway_says_so_at_once(deployment: Deployment) -> None:
    async with Processor(deployment.settings(**TCP, clients__max_clients=1)) as processor:
        others = {"bus__clients_address": processor.clients_address}
        async with (
            Client(deployment.settings(**others)) as busy,
            alone(deployment, **others) as served,
            plainly(served.url) as client,
        ):
            busy.resume(1, 0)  # one that has nothing open would make room
            await until(lambda: served.gateway.client.refusal)
            answer = await client.post("/v1/completions", json={"model": "tokenbus", "prompt": "a"})
            assert (answer.status_code, error_of(answer.text)["code"]) == (503, "no_processor")


async def test_answer_that_nobody_takes_is_thrown_away(deployment: Deployment) -> None:
    bounds = {
        "gateway__stream_buffer_bytes": 20_000,
        "gateway__write_timeout_ms": 100,
        "gateway__idle_timeout_ms": 1000,
    }
    async with serving(deployment, **bounds) as served:
        for ending in (b"Connection: close\r\n", b""):
            stalled = not_reading(served.address, wanted=asked(max_tokens=600, logprobs=20, n=4), ending=ending)
            try:
                await until(lambda: served.gateway.counts.requests["/v1/completions", "200"] >= 1)
                await until(lambda: served.gateway.counts.cut_clients == 1)
                await until(lambda: not served.gateway.connections)
            finally:
                stalled.close()
            served.gateway.counts.cut_clients = 0
            served.gateway.counts.requests.clear()
