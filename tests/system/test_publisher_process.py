"""A publisher's process of its own: how it starts and ends, whatever else the engine's process does."""

import asyncio
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.support.ports import free_ports
from tests.support.waiting import MOST, soon, until, wait_until
from tests.system.asking import all_exact, all_failed, ask, begun
from tests.system.deployment import Deployment, Overrides
from tokenbus.bus import AddressError, ZeroMQTransport
from tokenbus.cli import main
from tokenbus.client import Client
from tokenbus.worker import StepArrays
from tokenbus.worker.process.client import PublisherProcess
from tokenbus_contracts.generated.request_pb2 import ErrorCode

LONG = 600_000  # tokens that no test waits for


def step(key: int) -> StepArrays:
    return StepArrays(request_ids=[key], positions=[0], token_counts=[1], token_ids=[5])


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def many_open_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096) if hard > 0 else 4096, hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        yield
    finally:
        for each in files:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_it_lives_and_ends_with_its_owner(deployment: Deployment) -> None:
    """A child that its owner forks leaves it alone, and another takes its place when it dies, whatever file is free.

    vLLM's processes are forked so, and run what was registered for the end of a process, too.
    """
    deployment.start_processor()
    (port,) = free_ports(1)
    settings = deployment.settings(worker__metrics_address=f"127.0.0.1:{port}", worker__drain_timeout_ms=0)
    with PublisherProcess(settings) as publisher:
        first = publisher.pid
        child = os.fork()
        if not child:
            publisher.__exit__(None, None, None)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        publisher.emit(step(7))
        publisher.flush(MOST)
        assert b"tokenbus_worker_handed_over_items" in urlopen(f"http://127.0.0.1:{port}/metrics").read()
        assert publisher.pid == first
        assert is_there(first)
        with many_open_files():
            os.kill(first, signal.SIGKILL)
            wait_until(lambda: publisher.pid != first)
            assert publisher.take_requests(0.001) == []
        second = publisher.pid
        publisher.emit(step(8))
        publisher.flush(MOST)
    assert not is_there(second)


async def test_engine_that_is_stopped_is_lost_until_it_goes_on(deployment: Deployment) -> None:
    times: Overrides = {
        "bus__heartbeat_timeout_ms": 2000,
        "worker__longest_step_ms": 1000,
        "worker__drain_timeout_ms": 0,
    }
    deployment.start_processor(**times)
    worker = deployment.start_module("handing_worker", **times)
    async with Client(deployment.settings(**times)) as client:
        await asyncio.to_thread(worker.wait_for, '"connected"')
        lost = ask(client, 4, LONG, is_continued=False)
        await begun(lost)
        worker.stop()
        await all_failed(lost, ErrorCode.ERROR_CODE_WORKER_LOST)
        assert "made no progress" in str(lost[0].audit.error)
        worker.go_on()
        await asyncio.to_thread(worker.wait_for, '"connected"', 2)
        await all_exact(ask(client, 4, 300), 300)


async def test_engine_that_died_is_noticed_though_a_child_holds_its_files(deployment: Deployment) -> None:
    """The child was forked in C, so it has not let go of the bell by whose silence the publisher hears of an end."""
    deployment.start_processor()
    worker = deployment.start_module("forking_worker")
    async with Client(deployment.settings()) as client:
        await asyncio.to_thread(worker.wait_for, '"connected"')
        asked = ask(client, 4, LONG, is_continued=False)
        child = int((await asyncio.to_thread(worker.wait_for, "forked ")).split()[1])
        try:
            await begun(asked)
            worker.signal(signal.SIGKILL)
            await all_failed(asked, ErrorCode.ERROR_CODE_ENGINE)
            assert is_there(child)
        finally:
            os.kill(child, signal.SIGKILL)  # it holds the worker's output, too


def test_it_ends_at_once_when_its_owner_fails(deployment: Deployment) -> None:
    """Nothing is acknowledged where there is no processor, and nothing is waited for."""
    found = []
    settings = deployment.settings(worker__drain_timeout_ms=3_600_000, worker__metrics_address="127.0.0.1:0")

    def fail() -> None:
        with PublisherProcess(settings) as publisher:
            found.append(publisher.pid)
            publisher.emit(step(7))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not is_there(*found)


def killed_at_starts(folder: Path, times: int) -> tuple[Path, Path]:
    """Return a Python that is killed at its first so many starts, and a file with a line for each start."""
    python, starts = folder / "python", folder / "starts"
    python.write_text(f"""#!/bin/sh
echo >> {starts}
[ $(wc -l < {starts}) -gt {times} ] || kill -9 $$
exec {sys.executable} "$@"
""")
    python.chmod(0o755)
    return python, starts


def test_one_that_is_killed_as_it_starts_first_is_started_again(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, starts = killed_at_starts(tmp_path, 2)
    monkeypatch.setattr(sys, "executable", str(python))
    with PublisherProcess(deployment.settings(worker__drain_timeout_ms=0)) as publisher:
        assert is_there(publisher.pid)
    assert len(starts.read_text()) == 3


async def test_connection_closes_with_the_last_process_that_has_it(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor sees no publisher's death, however long the next one takes to start, and the whole worker's."""
    settings = deployment.settings(worker__drain_timeout_ms=0)
    python, may_start = tmp_path / "python", tmp_path / "may_start"
    python.write_text(f'#!/bin/sh\nread _ < {may_start}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    os.mkfifo(may_start)
    listener = await ZeroMQTransport(settings.bus).listen(settings.bus.workers_address)
    with PublisherProcess(settings) as publisher:
        peer, _ = await soon(listener.receive())
        await until(lambda: publisher._held_connection >= 0)
        first = publisher.pid
        monkeypatch.setattr(sys, "executable", str(python))
        os.kill(first, signal.SIGKILL)
        await until(lambda: not is_there(first))
        assert listener.is_connected(peer)
        may_start.write_text("now\n")
        while (other := (await soon(listener.receive()))[0]) == peer:
            pass
        await until(lambda: not listener.is_connected(peer))
    await until(lambda: not listener.is_connected(other))
    await listener.close()


def test_worker_whose_publisher_is_killed_at_each_start_ends_with_one_line(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python, starts = killed_at_starts(tmp_path, 100)
    monkeypatch.setattr(sys, "executable", str(python))
    settings = deployment.settings(worker__publisher="process", log__level="error")
    monkeypatch.setattr("tokenbus.cli.worker.load_engine_settings", lambda _: settings)
    assert main(["worker", "--engine", "synthetic"]) == 1
    *logged, last = capsys.readouterr().err.splitlines()
    assert last == "tokenbus: the publisher's process ended with status -9 before it published; its log may say why"
    assert ["cannot start" in line for line in logged] == [True, True]
    assert len(starts.read_text()) == 3


async def test_in_the_background_it_is_not_waited_for(deployment: Deployment, caplog: pytest.LogCaptureFixture) -> None:
    """Steps wait for a publisher whose address is taken, and that starts when it is free. Another owner is told."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = deployment.settings(worker__metrics_address=address, worker__drain_timeout_ms=0)
        with pytest.raises(AddressError, match=r"worker\.metrics_address|metrics"):
            PublisherProcess(settings).__enter__()
        with PublisherProcess(settings, in_background=True) as publisher:
            publisher.emit(step(7))
            await until(lambda: "cannot start" in caplog.text)
            assert publisher.pid == 0
            taken.close()
            publisher.flush(MOST)
            assert is_there(publisher.pid)
            assert publisher.take_aborts() == []
