"""What tests start and write ends with them, whatever ends them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.local import is_running
from tests.pages import ROOT
from tests.support import killed, orphans
from tests.support.waiting import wait_until


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Path]:
    """Return the file of what tests started; what a failure left of the processes is killed."""
    path = tmp_path / "started"
    yield path
    for pid in map(int, path.read_text().split()[1:] if path.exists() else []):
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGKILL, "1"), (signal.SIGINT, "0")])
def test_nothing_is_left_of_tests_that_are_ended(number: int, workers: str, started: Path) -> None:
    """The run is killed while one of its workers hangs, or is interrupted: its processes and its files are gone.

    So is what a process in a session of its own started.
    """
    variables = {name: value for name, value in os.environ.items() if name not in (orphans.FOLDER, "TMPDIR")}
    command = [sys.executable, "-m", "pytest", "-q", "-n", workers, f"{killed.__file__}"]
    run = subprocess.Popen(command, cwd=ROOT, env=variables | {killed.STARTED: str(started)}, stdout=subprocess.DEVNULL)
    wait_until(lambda: run.poll() is not None or (started.exists() and started.read_text().endswith("\n")))
    folder, *pids = started.read_text().split()
    assert folder != os.environ[orphans.FOLDER]
    assert all(is_running(int(pid)) for pid in pids)
    run.send_signal(number)
    assert run.wait() != 0
    wait_until(lambda: not any(is_running(int(pid)) for pid in pids) and not Path(folder).exists())


def test_no_temporary_file_lies_elsewhere() -> None:
    """No test and no benchmark chooses where its temporary files lie: the run's folder is removed with them."""
    for path in (each for folder in ("tests", "benchmarks") for each in (ROOT / folder).rglob("*.py")):
        assert 'dir="/tmp"' not in path.read_text() or path in map(Path, (orphans.__file__, __file__)), path


def test_busy_loops_end_with_their_command() -> None:
    count = "import os; print(*open(f'/proc/{os.getppid()}/task/{os.getppid()}/children').read().split()); exit(3)"
    command = [sys.executable, "-m", "tests.support.busy", "2", "--", sys.executable, "-c", count]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert run.returncode == 3
    watcher, *loops, _ = map(int, run.stdout.split())
    assert len(loops) == 2
    assert not any(map(is_running, loops))
    wait_until(lambda: not is_running(watcher))
