"""What tests start ends with them, whatever ends them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.local import is_running
from tests.pages import ROOT
from tests.support import killed, nats
from tests.support.nats import NatsServer
from tests.support.waiting import MOST, wait_until


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Path]:
    """Return the file of the processes that tests started; what a failure left of them is killed."""
    path = tmp_path / "started"
    yield path
    for pid in map(int, path.read_text().split() if path.exists() else []):
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("test", [name for name in dir(killed) if name.startswith("test_")])
def test_servers_end_with_the_tests(test: str, started: Path) -> None:
    """A server, and what a process of a session of its own started, are gone after the tests' process was killed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "1",
        "--max-worker-restart",
        "0",
        f"{killed.__file__}::{test}",
    ]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {killed.STARTED: str(started)},
        check=False,
        capture_output=True,
        timeout=MOST,
    )
    assert run.returncode != 0
    pids = [int(pid) for pid in started.read_text().split()]
    assert len(pids) == 3, run.stdout
    wait_until(lambda: not any(map(is_running, pids)))


def test_server_that_does_not_start_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of a server that never says that it listens is gone when the wait for that has failed."""

    def fail(_condition: object) -> None:
        """Fail as a wait does that has lasted too long."""
        raise AssertionError("too long")

    monkeypatch.setattr(nats, "wait_until", fail)
    server = NatsServer.__new__(NatsServer)
    with pytest.raises(AssertionError, match="too long"):
        server.__init__(tmp_path)  # type: ignore[misc]  # to have it although it was not made
    assert server.process.poll() == -signal.SIGKILL
