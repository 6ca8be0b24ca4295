"""A publisher's process of its own: how it starts and ends, whatever else the engine's process does."""

import os
import resource
import signal
import socket

import pytest

from tests.support.waiting import MOST, until
from tests.system.deployment import Deployment
from tokenbus.bus import AddressError
from tokenbus.worker import StepArrays
from tokenbus.worker.process.client import PublisherProcess


def step(key: int) -> StepArrays:
    return StepArrays(request_keys=[key], positions=[0], token_counts=[1], token_ids=[5])


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_ends_with_its_owner(deployment: Deployment) -> None:
    deployment.start_processor()
    with PublisherProcess(deployment.settings()) as publisher:
        pid = publisher.pid
        publisher.emit(step(7))
        publisher.flush(MOST)
    assert not is_there(pid)


def test_it_ends_at_once_when_its_owner_fails(deployment: Deployment) -> None:
    """Nothing is acknowledged where there is no processor, and nothing is waited for."""
    found = []

    def fail() -> None:
        with PublisherProcess(deployment.settings(worker__drain_timeout_ms=3_600_000)) as publisher:
            found.append(publisher.pid)
            publisher.emit(step(7))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not is_there(*found)


def test_child_of_a_fork_leaves_it_alone(deployment: Deployment) -> None:
    """As vLLM's processes are forked, which run what was registered for the end of a process, too."""
    deployment.start_processor()
    with PublisherProcess(deployment.settings()) as publisher:
        pid = publisher.pid
        child = os.fork()
        if not child:
            publisher.__exit__(None, None, None)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        publisher.emit(step(7))
        publisher.flush(MOST)
        assert publisher.pid == pid
        assert is_there(pid)


async def test_it_is_heard_though_many_files_are_open(deployment: Deployment) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096) if hard > 0 else 4096, hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with PublisherProcess(deployment.settings(worker__drain_timeout_ms=0)) as publisher:
            before = publisher.pid
            assert publisher.take_requests(0.001) == []
            os.kill(before, signal.SIGKILL)
            await until(lambda: publisher.pid != before)
            assert publisher.take_requests(0.001) == []
    finally:
        for each in files:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_in_the_background_it_is_not_waited_for(deployment: Deployment, caplog: pytest.LogCaptureFixture) -> None:
    """Steps wait for a publisher that cannot start, and that starts when it can."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = deployment.settings(worker__metrics_address=address, worker__drain_timeout_ms=0)
        with PublisherProcess(settings, in_background=True) as publisher:
            publisher.emit(step(7))
            await until(lambda: "cannot start" in caplog.text)
            assert publisher.pid == 0
            taken.close()
            publisher.flush(MOST)
            assert is_there(publisher.pid)
            assert publisher.take_aborts() == []


def test_address_that_is_taken_is_said(deployment: Deployment) -> None:
    with PublisherProcess(deployment.settings(worker__drain_timeout_ms=0, worker__metrics_address="127.0.0.1:0")):
        pass
    with pytest.raises(AddressError, match=r"worker\.metrics_address|metrics"):
        PublisherProcess(deployment.settings(worker__metrics_address="192.0.2.1:1")).__enter__()
