"""A gateway of several processes is one gateway outside: its limits, its metrics, its health and its end."""

import asyncio
import os
import resource
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import tokenbus_services.gateway.supervisor
from tests.integration.bytewise import connected
from tests.integration.deployment import COMMAND, Deployment
from tests.integration.serving import Served, asking, error_of, is_true, plainly, served
from tests.support.waiting import MOST, soon, until
from tokenbus_services.gateway.api_keys import made, write_keys
from tokenbus_services.gateway.group import SummedMetrics
from tokenbus_services.gateway.supervisor import Supervisor, serve_processes

pytestmark = pytest.mark.xdist_group("gateway")
MODEL = "tokenbus"
PROCESSES = 3
MOST_REQUESTS = 8
SEVERAL: dict[str, Any] = {
    "gateway__tokenizer": "numbers",
    "gateway__processes": PROCESSES,
    "gateway__max_requests": MOST_REQUESTS,
    "gateway__drain_timeout_ms": 0,
    "gateway__compression": "gzip",
}
PACE = ("--steps-per-second", "20")
_ENDLESS = {"model": MODEL, "prompt": [1], "max_tokens": 100_000, "stream": True}


@pytest.fixture(scope="module")
def several() -> Iterator[Served]:
    """Run a system with a gateway of several processes, at a pace at which streams that are not read may go on."""
    with served(**SEVERAL) as system:
        system.start_worker("worker-0", *PACE)
        yield system


@pytest.fixture
def passing() -> Iterator[Served]:
    """Run another, whose processes end in the test."""
    with served(**SEVERAL) as system:
        system.start_worker("worker-0", *PACE)
        yield system


def _processes(system: Served) -> list[int]:
    pid = system.gateway.pid
    children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    assert len(children) == PROCESSES
    return children


def _are_gone(pids: Sequence[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@asynccontextmanager
async def _supervised(**overrides: object) -> AsyncIterator[Supervisor]:
    """Run a gateway of two processes, whose supervisor is in this process and whose processor is not there."""
    with TemporaryDirectory(prefix="tb", dir="/tmp") as folder:
        given = {"gateway__processes": 2, "gateway__address": "127.0.0.1:0", "gateway__metrics_address": "127.0.0.1:0"}
        chosen = Deployment(Path(folder)).settings(**{**SEVERAL, **given, **overrides})
        async with serve_processes(chosen) as supervisor:
            yield supervisor


async def _metrics(url: str) -> dict[str, float]:
    async with plainly(url) as client:
        page = (await client.get("/metrics")).text
    found: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found[sample.name] += sample.value
    return dict(found)


async def _counts(url: str, name: str, count: float) -> bool:
    """Tell whether a metric of the gateway has a value: each process reports once a second."""
    return (await _metrics(url)).get(f"tokenbus_gateway_{name}") == count


@asynccontextmanager
async def _streams(url: str, count: int) -> AsyncIterator[Sequence[httpx.Response]]:
    """Open streams that do not end, each on a connection of its own, and read the beginning of each."""
    async with AsyncExitStack() as stack:
        opened = []
        for _ in range(count):
            client = await stack.enter_async_context(plainly(url))
            response = await stack.enter_async_context(client.stream("POST", "/v1/completions", json=_ENDLESS))
            assert response.status_code == 200, (await response.aread()).decode()
            opened.append(response)
        yield opened


async def _status(url: str, **headers: str) -> tuple[int, str]:
    """Return the status of one more short request, on a connection of its own, and its error's code."""
    async with plainly(url) as client:
        asked = {**_ENDLESS, "stream": False, "max_tokens": 1}
        answer = await client.post("/v1/completions", json=asked, headers=headers)
        return answer.status_code, "" if answer.is_success else error_of(answer.text)["code"]


async def test_answers_of_several_processes_count_as_those_of_one(passing: Served) -> None:
    async with asking(passing.url) as client:
        for _ in range(3):
            answers = await asyncio.gather(
                *(client.completions.create(model=MODEL, prompt=[1], max_tokens=20, logprobs=2) for _ in range(6))
            )
            assert all(map(is_true, answers))
    await until(lambda: _counts(passing.url, "tokens_total", 3 * 6 * 20))
    after = await _metrics(passing.url)
    assert (after["tokenbus_gateway_processes"], after["tokenbus_gateway_connected_processors"]) == (PROCESSES, 1)
    async with plainly(passing.url) as plain:
        health = (await plain.get("/healthz")).json()
        assert (health["status"], health["processes"]) == ("ok", PROCESSES)
        assert (await plain.get("/readyz")).json() == {"status": "ready", "problems": []}


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_answers_are_compressed_for_clients_that_accept_it(several: Served, is_streamed: bool) -> None:  # noqa: FBT001
    asked = {**_ENDLESS, "max_tokens": 20, "logprobs": 5, "stream": is_streamed}
    async with plainly(several.url) as client:
        plain = await client.post("/v1/completions", json=asked, headers={"accept-encoding": "gzip;q=0"})
        assert "content-encoding" not in plain.headers
        found = b""
        async with client.stream("POST", "/v1/completions", json=asked) as response:
            assert response.headers["content-encoding"] == "gzip"
            async for data in response.aiter_bytes():
                if is_streamed and data:
                    assert data.endswith(b"\n\n")
                found += data
            assert response.num_bytes_downloaded < len(found) / 2
    assert len(found) == pytest.approx(len(plain.content), rel=0.1)


async def test_each_process_takes_connections() -> None:
    async with _supervised(gateway__processes=PROCESSES) as supervisor, AsyncExitStack() as stack:
        for _ in range(PROCESSES * 16):
            _, writer = await connected(supervisor.address)
            stack.callback(writer.close)
        port = int(supervisor.address.rpartition(":")[2])
        own = [_connections(each.process.pid, port) for each in supervisor.processes.values()]
        await until(lambda: sum(count() for count in own) == PROCESSES * 16)
        assert all(count() for count in own)


def _connections(pid: int, port: int) -> Callable[[], int]:
    """Return a function that counts a process's open connections to a port."""

    def count() -> int:
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        inodes = {f"socket:[{each[9]}]" for each in lines if each[1].endswith(f":{port:04X}") and each[3] == "01"}
        return sum(str(each.readlink()) in inodes for each in Path(f"/proc/{pid}/fd").iterdir())

    return count


async def test_open_requests_are_limited_over_all_processes(several: Served) -> None:
    async with _streams(several.url, MOST_REQUESTS):
        assert [await _status(several.url) for _ in range(PROCESSES)] == [(429, "overloaded")] * PROCESSES

    async def has_room() -> bool:
        return await _status(several.url) == (200, "")

    await until(has_room)


async def test_process_that_dies_is_started_again(passing: Served) -> None:
    pids = _processes(passing)
    before = await _metrics(passing.url)
    async with _streams(passing.url, MOST_REQUESTS) as streams:
        await until(lambda: _counts(passing.url, "open_requests", MOST_REQUESTS))
        os.kill(pids[0], signal.SIGKILL)
        line = passing.gateway.wait_for("a process of the gateway ended")
        assert '"status":-9' in line
        left = round((await _metrics(passing.url))["tokenbus_gateway_open_requests"])
        reading = [asyncio.create_task(stream.aread()) for stream in streams]
        await until(lambda: sum(each.done() for each in reading) == MOST_REQUESTS - left)
        broken = [each.exception() for each in reading if each.done()]
        assert 0 < len(broken) < MOST_REQUESTS
        assert all(isinstance(each, httpx.RemoteProtocolError) for each in broken)
        async with _streams(passing.url, len(broken)):
            assert await _status(passing.url) == (429, "overloaded")
        for each in reading:
            each.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
    passing.gateway.wait_for('"connected"', PROCESSES + 1)
    await until(lambda: _counts(passing.url, "processes", PROCESSES))
    after = await _metrics(passing.url)
    assert after["tokenbus_gateway_lost_processes_total"] == 1
    assert after["tokenbus_gateway_tokens_total"] >= before.get("tokenbus_gateway_tokens_total", 0)


async def test_process_that_stands_still_gets_no_connections_and_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that stands still takes nothing, is served again when it goes on, and is replaced if it does not."""
    async with _supervised() as supervisor:
        url, stopped = f"http://{supervisor.address}", supervisor.processes[0]
        os.kill(stopped.process.pid, signal.SIGSTOP)
        for _ in range(20):
            assert await soon(_page(url)) == 200
        await until(lambda: stopped.missed > 1)
        os.kill(stopped.process.pid, signal.SIGCONT)
        await until(lambda: not stopped.missed)
        os.kill(stopped.process.pid, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(tokenbus_services.gateway.supervisor, "_MOST_MISSED", 2)
            assert await soon(stopped.process.wait()) == -signal.SIGKILL
        await until(lambda: supervisor.processes.get(0) not in {None, stopped})
        await until(lambda: supervisor.processes[0].health)
        for _ in range(4):
            assert await _page(url) == 200


async def _page(url: str) -> int:
    """Return the status of a page that each process has, on a connection of its own."""
    async with plainly(url) as client:
        return (await client.get("/openapi.json")).status_code


async def test_process_that_cannot_be_started_is_tried_again(passing: Served) -> None:
    pids = _processes(passing)
    supervisor = passing.gateway.pid
    most = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (3, most[1]))
    os.kill(pids[0], signal.SIGKILL)
    assert "too many open files" in passing.gateway.wait_for("a process of the gateway cannot be started", 2).lower()
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, most)
    passing.gateway.wait_for('"connected"', PROCESSES + 1)
    await until(lambda: _counts(passing.url, "processes", PROCESSES))


async def test_processor_that_hangs_makes_it_not_ready(passing: Served) -> None:
    async with plainly(passing.url) as client:

        async def is_ready() -> bool:
            answer = await client.get("/readyz")
            assert (answer.status_code, bool(answer.json()["problems"])) in [(200, False), (503, True)]
            return answer.is_success

        async def is_not_ready() -> bool:
            return not await is_ready()

        await until(is_ready)
        os.kill(passing.processor.pid, signal.SIGSTOP)
        try:
            await until(is_not_ready)
            # A process keeps an answer for half a second, and then asks the processor again.
            end = time.monotonic() + 3
            while time.monotonic() < end:
                assert await is_not_ready()
        finally:
            os.kill(passing.processor.pid, signal.SIGCONT)
        await until(is_ready)


async def test_supervisor_that_failed_is_seen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object) -> None:
        raise ValueError("no page of metrics")

    monkeypatch.setattr(SummedMetrics, "take", failing)
    async with _supervised() as supervisor:
        await until(lambda: "the supervisor failed" in caplog.text)
        assert "no page of metrics" in caplog.text
        await until(lambda: "its supervisor has failed: restart the gateway" in supervisor.health().problems)


async def test_stuck_supervisor_is_seen() -> None:
    """While the supervisor's event loop stands still its metrics are those of before, and that is its problem."""
    async with _supervised(metrics__stall_timeout_ms=1000) as supervisor:
        names = {metric.name for metric in await asyncio.to_thread(supervisor.collect)}
        assert "tokenbus_gateway_processes" in names
        with ThreadPoolExecutor() as pool:  # the loop waits for the thread, and does nothing else
            assert {metric.name for metric in pool.submit(supervisor.collect).result()} == names
            (problem,) = pool.submit(_problems, supervisor).result()
        assert problem.startswith("its event loop has not answered for ")
        await until(lambda: not supervisor.health().problems)


def _problems(supervisor: Supervisor) -> Sequence[str]:
    while not (problems := supervisor.health().problems):
        time.sleep(0.05)
    return problems


async def test_supervisor_that_stands_still_is_told_to_who_asks(passing: Served) -> None:
    """What only the supervisor knows is answered with an error while it stands still; requests are served."""
    asked = {**_ENDLESS, "stream": False, "max_tokens": 1}
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(plainly(passing.url)) for _ in range(4)]
        for each in clients:  # by a connection that a process has already
            assert (await each.get("/healthz")).status_code == 200
        passing.gateway.stop()
        try:
            assert (await clients.pop().post("/v1/completions", json=asked)).status_code == 200
            paths = ("/healthz", "/readyz", "/metrics")
            answers = await asyncio.gather(*(each.get(path) for each, path in zip(clients, paths, strict=True)))
        finally:
            passing.gateway.go_on()
    for answer in answers:
        assert (answer.status_code, error_of(answer.text)["code"]) == (503, "stalled")
        assert "supervisor" in error_of(answer.text)["message"]
    await asyncio.to_thread(passing.gateway.terminate)
    assert "Traceback" not in passing.gateway.output


async def test_sigterm_drains_all_processes(passing: Served) -> None:
    pids = _processes(passing)
    async with _streams(passing.url, PROCESSES) as streams:
        leaving = asyncio.create_task(asyncio.to_thread(passing.gateway.terminate))
        for stream in streams:
            text = (await stream.aread()).decode()
            assert '"code":"stopping"' in text
    assert await leaving == 0
    assert _are_gone(pids)


async def test_who_connects_while_all_drain_is_refused_at_once() -> None:
    """No client waits for a gateway that leaves: a load balancer goes to the next one."""
    with served(**SEVERAL | {"gateway__drain_timeout_ms": int(MOST * 1000)}) as system:
        system.start_worker("worker-0", *PACE)
        async with _streams(system.url, 1):
            leaving = asyncio.create_task(asyncio.to_thread(system.gateway.terminate))

            async def is_refused() -> bool:
                try:
                    async with plainly(system.url) as client:
                        await client.get("/healthz")
                except httpx.ConnectError:
                    return True
                except (httpx.ReadError, httpx.RemoteProtocolError):  # it had come in when the sockets closed
                    return False
                return False

            await until(is_refused)
            assert not leaving.done()
        assert await leaving == 0


async def test_processes_end_with_their_supervisor(passing: Served) -> None:
    pids = _processes(passing)
    passing.gateway.kill()
    await until(lambda: _are_gone(pids))


async def test_limits_of_a_key_hold_over_all_processes(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    rated, key = made("rated", requests_per_minute=5)
    narrow, other = made("narrow", concurrent=2)
    write_keys(file, [key, other])
    with served(**SEVERAL, gateway__keys_file=str(file)) as system:
        system.start_worker("worker-0", *PACE)
        found = [await _status(system.url, authorization=f"Bearer {rated}") for _ in range(6)]
        assert found == [(200, "")] * 5 + [(429, "rate_limit_exceeded")]
        async with AsyncExitStack() as stack:
            for _ in range(2):
                client = await stack.enter_async_context(plainly(system.url))
                client.headers["authorization"] = f"Bearer {narrow}"
                response = await stack.enter_async_context(client.stream("POST", "/v1/completions", json=_ENDLESS))
                assert response.status_code == 200
            refused = [await _status(system.url, authorization=f"Bearer {narrow}") for _ in range(PROCESSES)]
            assert refused == [(429, "concurrency_limit_exceeded")] * PROCESSES


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("gateway.processes=0", "gateway.processes: 1 to 64 processes, got 0"),
        ("gateway.processes=65", "gateway.processes: 1 to 64 processes, got 65"),
        ("gateway.processes=many", "gateway.processes: "),
        ("gateway.tokenizer=none", "gateway.tokenizer: one of"),
        ("bus.clients_address=memory://x", "memory://x: "),
        ("bus.clients_address=tcp://192.0.2.1:5571", "tcp://192.0.2.1:5571: beyond loopback it needs keys"),
    ],
)
def test_bad_settings_are_one_line(given: str, told: str) -> None:
    command = [COMMAND, "gateway", "--processes", "2", "--address", "127.0.0.1:0", "--set", given]
    if "processes" in given:
        command = [*command[:2], *command[4:]]
    found = subprocess.run(command, capture_output=True, text=True, timeout=MOST, check=False)
    (line,) = [each for each in found.stderr.splitlines() if not each.startswith("{")]
    assert found.returncode == 2
    assert told in line
