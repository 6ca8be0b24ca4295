"""How metrics and health are served: by whom, where, and to whom whatever happens."""

import asyncio
import contextlib
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tests.metrics.running import Bus, Scrape, settings
from tests.support.waiting import MOST, until
from tokenbus.bus import AddressError
from tokenbus.delivery import Step
from tokenbus.metrics.processor import serve_processor
from tokenbus.metrics.publisher import serve_publisher
from tokenbus.metrics.server import _MOST_CONNECTIONS, Health, LoopWatch, MetricsServer
from tokenbus.testing import ManualClock


def get(url: str) -> tuple[int, str, str]:
    try:
        with urllib.request.urlopen(url, timeout=MOST) as answer:  # noqa: S310 - our own server
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def say(server: MetricsServer, text: bytes) -> bytes:
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), MOST) as connection:
        connection.sendall(text)
        return b"".join(iter(lambda: connection.recv(65536), b""))


class Broken(Collector):
    def collect(self) -> Iterator[Metric]:
        raise RuntimeError("a defect")


@pytest.fixture
def served() -> Iterator[MetricsServer]:
    watch = LoopWatch(lambda: None, ManualClock().now)
    server = MetricsServer("processor.metrics_address", "127.0.0.1:0", Broken(), lambda: Health((), {}), watch)
    server.start()
    yield server
    server.stop()


# What a processor and a worker serve.


async def test_processor_serves_metrics_and_health() -> None:
    bus = Bus()
    seen: list[Step] = []
    bus.processor.intake.step_observers.append(seen.append)
    async with serve_processor(bus.processor) as server, bus.running():
        assert not server.address.endswith(":0")
        await bus.serve(requests=1, tokens=3)
        status, kind, text = await asyncio.to_thread(get, f"{server.url}/metrics")
        health = await asyncio.to_thread(get, f"{server.url}/healthz")
    assert status == 200
    assert kind.startswith("text/plain; version=")
    told = Scrape(text)
    assert told("stream_tokens_total", worker="worker-0") == 3
    assert told("delivery_latency_seconds_count") == len(seen) == 1
    assert health[:2] == (200, "application/json")
    assert json.loads(health[2]) == {
        "status": "ok", "problems": [], "service": "processor", "id": bus.processor.id, "is_draining": False,
        "workers": 1, "clients": 1, "open_requests": 0,
    }  # fmt: skip


async def test_worker_serves_metrics_and_health() -> None:
    bus = Bus()
    with serve_publisher(bus.publisher) as server:
        async with bus.running():
            await until(lambda: bool(bus.publisher.session.handshakes))
            status, _, text = await asyncio.to_thread(get, f"{server.url}/metrics")
            health = await asyncio.to_thread(get, f"{server.url}/healthz")
    assert (status, Scrape(text)("worker_connected_processors", worker="worker-0")) == (200, 1)
    told = json.loads(health[2])
    assert (health[0], told["status"], told["connection"]) == (200, "ok", "open")
    assert told["processor"] == bus.processor.id


async def test_who_does_not_run_is_not_healthy() -> None:
    bus = Bus()
    async with serve_processor(bus.processor) as one:
        with serve_publisher(bus.publisher) as other:
            before = [await asyncio.to_thread(get, f"{server.url}/healthz") for server in (one, other)]
            async with bus.running():
                pass
            after = [await asyncio.to_thread(get, f"{server.url}/healthz") for server in (one, other)]
    for processor, publisher in (before, after):
        assert processor[0] == publisher[0] == 503
        assert json.loads(processor[2])["problems"] == ["it does not listen for workers and clients"]
        assert json.loads(publisher[2])["problems"] == ["it does not publish: it was not started, or it was closed"]


async def test_a_stuck_loop_is_told_by_who_is_not_stuck() -> None:
    bus = Bus(settings(bus__stall_timeout_ms=1))
    told: list[tuple[int, str, str]] = []

    def ask() -> None:
        while not told or told[-1][0] == 200:
            told.append(get(f"{server.url}/healthz"))
        told.append(get(f"{server.url}/metrics"))

    async with serve_processor(bus.processor) as server, bus.processor:
        asking = threading.Thread(target=ask)
        asking.start()
        asking.join()  # on the event loop, which is stuck until there is an answer
    assert told[-1][0] == 200
    (problem,) = json.loads(told[-2][2])["problems"]
    assert problem.startswith("its event loop has not answered for ")


# Where.


async def test_a_taken_address_is_one_line() -> None:
    bus = Bus()
    async with serve_processor(bus.processor) as server:
        other = Bus(settings(processor__metrics_address=server.address, worker__metrics_address=server.address))
        with pytest.raises(AddressError) as raised:
            await serve_processor(other.processor).__aenter__()
        taken = f"{server.address}: taken: something listens there already"
        assert str(raised.value) == f"processor.metrics_address: {taken}"
        with pytest.raises(AddressError, match=f"worker.metrics_address: {server.address}: taken"):
            serve_publisher(other.publisher).__enter__()
        assert (await asyncio.to_thread(get, f"{server.url}/healthz"))[0] == 503


async def test_a_bad_address_is_one_line() -> None:
    for address, reason in (("192.0.2.1:0", "no address of this machine"), ("a b:1", "expected HOST:PORT")):
        bus = Bus(settings(processor__metrics_address=address))
        with pytest.raises(AddressError) as raised:
            await serve_processor(bus.processor).__aenter__()
        assert str(raised.value) == f"processor.metrics_address: {address}: {reason}"


# To whom.


def test_other_paths_methods_and_a_defect_are_answered(served: MetricsServer) -> None:
    assert get(f"{served.url}/metrics")[0] == 500
    assert get(f"{served.url}/")[0] == 404
    assert get(f"{served.url}/healthz?verbose=1")[0] == 200
    assert say(served, b"POST /metrics HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 405 Method Not Allowed\r\n")
    assert b"\r\nAllow: GET, HEAD\r\n" in say(served, b"POST /metrics HTTP/1.1\r\n\r\n")
    for garbage in (
        b"\x16\x03\x01\r\n\r\n",
        b"GET /metrics\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"x" * 8192,
    ):
        assert say(served, garbage).startswith(b"HTTP/1.1 400 Bad Request\r\n")


def test_silent_connections_are_bounded_and_delay_no_other(served: MetricsServer) -> None:
    host, port = served.address.rsplit(":", 1)

    def connected(peers: int) -> list[socket.socket]:
        return [socket.create_connection((host, int(port)), MOST) for _ in range(peers)]

    silent = connected(5)
    assert get(f"{served.url}/healthz")[0] == 200
    silent += connected(_MOST_CONNECTIONS - 5)
    over = connected(2)
    for connection in over:
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    for connection in (*silent, *over):
        connection.close()
