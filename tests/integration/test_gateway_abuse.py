"""Clients of the gateway that misbehave: each is answered or cut off, and nobody else notices."""

import asyncio
import json
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.integration.deployment import Deployment
from tests.integration.inprocess import TCP, working
from tests.integration.serving import asking, error_of, is_true, plainly
from tests.integration.waiting import soon, until
from tokenbus_services.gateway.server import Serving, serve_gateway
from tokenbus_services.processor import TokenProcessor
from tokenbus_services.worker.synthetic import SyntheticEngine

pytestmark = pytest.mark.xdist_group("gateway")
GATEWAY = {"gateway__address": "127.0.0.1:0", "gateway__tokenizer": "numbers", "gateway__drain_timeout_ms": 0}
LONG = 1_000_000


@asynccontextmanager
async def serving(deployment: Deployment, **overrides: object) -> AsyncIterator[Serving]:
    """Run a processor, a worker and a gateway in this process."""
    settings = deployment.settings(**TCP, processor__drain_timeout_ms=0, **overrides)
    async with TokenProcessor(settings) as processor:
        addresses: dict[str, object] = {
            "bus__workers_address": processor.workers_address,
            "bus__clients_address": processor.clients_address,
        }
        async with (
            working(deployment, SyntheticEngine(), **addresses, **overrides),
            serve_gateway(
                deployment.settings(**addresses, **GATEWAY, client__drain_timeout_ms=0, **overrides)
            ) as served,
        ):
            await until(lambda: "worker-0" in processor.workers.by_id and processor.clients.sessions)
            yield served


@asynccontextmanager
async def alone(deployment: Deployment, **overrides: object) -> AsyncIterator[Serving]:
    """Run a gateway in this process, whose processor is not there."""
    async with serve_gateway(deployment.settings(**GATEWAY, client__drain_timeout_ms=0, **overrides)) as served:
        yield served


async def sent(served: Serving, *pieces: bytes) -> bytes:
    """Return what comes for some bytes until the gateway closes the connection."""
    host, _, port = served.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await soon(reader.read())
    finally:
        writer.close()


@asynccontextmanager
async def still_serves(served: Serving) -> AsyncIterator[None]:
    """Fail unless a request gets its true tokens while the others misbehave."""
    yield
    async with asking(served.url) as client:
        assert is_true(await client.completions.create(model="tokenbus", prompt="a", logprobs=0, max_tokens=40))


async def test_header_that_is_too_long_is_431(deployment: Deployment) -> None:
    """A request line or headers beyond their bound are refused as they come, whole, in pieces or never ending."""
    async with alone(deployment, gateway__max_header_bytes=2048) as served:
        for pieces in (
            [b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n"],
            [b"GET / HTTP/1.1\r\nX: " + b"a" * 5000 + b"\r\n\r\n"],
            [b"GET / HTTP/1.1\r\nX: ", *[b"a" * 500] * 5],
            [b"GET / HTTP/1.1\r\n", *[b"X-%d: 1\r\n" % number for number in range(102)], b"\r\n"],
            [b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 102],
        ):
            head, _, body = (await sent(served, *pieces)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 431 ")
            assert error_of(body.decode())["code"] == "request_header_fields_too_large"
        assert served.gateway.counts.requests["other", "431"] == 5


async def test_header_of_many_bytes_within_the_bound_is_taken(deployment: Deployment) -> None:
    """What is within the bound is no attack, and a body that comes with it is not counted to the header."""
    async with alone(deployment, gateway__max_header_bytes=2048) as served, plainly(served.url) as client:
        assert (await client.get("/healthz", headers={"x": "a" * 1500})).status_code == 200
        answer = await client.post("/v1/completions", json={"model": "tokenbus", "prompt": "a" * 60_000, "x": 1})
        assert error_of(answer.text)["param"] == "x"


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nX y: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: \x00\r\n\r\n",
        b"POST /inspect HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /inspect HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /inspect HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
        b"POST /inspect HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
    ],
)
async def test_what_is_no_http_is_400(deployment: Deployment, data: bytes) -> None:
    """Bytes that are no HTTP, or say two things at once, are refused and the connection is closed."""
    async with alone(deployment) as served:
        head, _, body = (await sent(served, data)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert error_of(body.decode())


async def test_slow_header_and_silent_connection_are_closed(deployment: Deployment) -> None:
    """Who sends a header too slowly gets 408, a body 408, and who never sends anything is closed."""
    async with alone(deployment, gateway__request_timeout_ms=100, gateway__idle_timeout_ms=300) as served:
        slow = await sent(served, b"GET / HTTP/1.1\r\nHost: a\r\n")
        assert slow.startswith(b"HTTP/1.1 408 ")
        body = b"POST /inspect HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n"
        assert (await sent(served, body + b"Connection: close\r\n\r\n{")).startswith(b"HTTP/1.1 408 ")
        assert await sent(served) == b""
        assert served.gateway.counts.late_requests == 1


async def test_thousand_idle_connections_disturb_nobody(deployment: Deployment) -> None:
    """1,000 connections that say nothing stay open, and requests are served beside them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    async with serving(deployment) as served:
        host, _, port = served.address.rpartition(":")
        sockets = []
        try:
            for _ in range(1000):
                idle = socket.create_connection((host, int(port)))
                idle.setblocking(False)  # noqa: FBT003 - the library's own
                sockets.append(idle)
                await asyncio.sleep(0)
            await until(lambda: served.gateway.connected >= 1000)
            async with still_serves(served):
                pass
            for idle in sockets:
                with pytest.raises(BlockingIOError):
                    idle.recv(1)
        finally:
            for idle in sockets:
                idle.close()


async def test_connection_too_many_is_503(deployment: Deployment) -> None:
    """Beyond the bound a connection is told 503 and closed; those that are there are served."""
    async with alone(deployment, gateway__max_connections=2) as served, plainly(served.url) as client:
        assert (await client.get("/healthz")).status_code == 200
        host, _, port = served.address.rpartition(":")
        _, first = await asyncio.open_connection(host, int(port))
        refused = await sent(served)
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert served.gateway.counts.refused_connections == 1
        assert (await client.get("/healthz")).status_code == 200
        first.close()


def _stalled(served: Serving, room: int = 4096) -> socket.socket:
    """Return a client's socket that has asked for a stream, has room for little, and does not read."""
    host, _, port = served.address.rpartition(":")
    stalled = socket.socket()
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    stalled.connect((host, int(port)))
    body = json.dumps({"model": "tokenbus", "prompt": "a", "max_tokens": LONG, "logprobs": 20, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    stalled.sendall(head % len(body) + body)
    return stalled


async def test_client_that_does_not_read_loses_its_request_alone(deployment: Deployment) -> None:
    """A client that takes nothing has its request ended at its bound, and is cut off; others get every token."""
    async with serving(deployment, gateway__stream_buffer_bytes=200_000, gateway__write_timeout_ms=300) as served:
        gateway = served.gateway
        stalled = _stalled(served)
        try:
            async with still_serves(served):
                await until(lambda: gateway.feed.aborted == 1)
            await until(lambda: gateway.counts.cut_clients == 1)
            await until(lambda: not gateway.counts.open_answers and not len(gateway.feed))
            assert gateway.counts.peak_outbox_bytes < 300_000
        finally:
            stalled.close()


async def test_client_that_reads_late_is_told(deployment: Deployment) -> None:
    """A client that reads too slowly, and then goes on, finds an error at its stream's end."""
    async with serving(deployment, gateway__stream_buffer_bytes=200_000) as served:
        stalled = _stalled(served, room=100_000)
        try:
            await until(lambda: served.gateway.feed.aborted == 1)
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
            assert "gateway.stream_buffer_bytes" in error["message"]
        finally:
            stalled.close()


async def test_several_requests_of_one_connection_are_answered_in_turn(deployment: Deployment) -> None:
    """Requests that a client sends without waiting for answers are answered in their order, each in full."""
    body = json.dumps({"model": "tokenbus", "prompt": "a", "max_tokens": 9, "stream": True}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    last = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    async with serving(deployment) as served:
        data = await sent(served, (post % len(body) + body) * 2 + last)
    assert data.count(b"HTTP/1.1 200 OK") == 3
    assert data.count(b"data: [DONE]") == 2
    assert data.index(b'"object":"list"') > data.rindex(b"data: [DONE]")


async def test_answer_that_is_too_large_is_refused(deployment: Deployment) -> None:
    """An answer that is not streamed and goes over its bound ends with an error that names the setting."""
    async with serving(deployment, gateway__answer_bytes=20_000) as served, plainly(served.url) as client:
        body = {"model": "tokenbus", "prompt": "a", "max_tokens": LONG, "logprobs": 20}
        answer = await client.post("/v1/completions", json=body)
        assert (answer.status_code, error_of(answer.text)["code"]) == (400, "answer_too_large")
        assert "gateway.answer_bytes" in answer.text
        await until(lambda: not len(served.gateway.feed))
