"""A forked process does what a started one does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fork_server import COMMAND
from tests.support.processes import Forked, run, start
from tests.system.programs import Program

WRONG = [COMMAND, "processor", "--set", "bus.no_such=1"]


@pytest.mark.parametrize(
    ("command", "given"),
    [(WRONG, b""), ([COMMAND, "check", "-"], b"\xff")],
)
def test_run_is_the_same(command: list[str], given: bytes, tmp_path: Path) -> None:
    """A forked command has the output, the errors and the exit status of one that an interpreter was started for."""
    forked, started = (
        run(command, input=given, cwd=tmp_path, env={**os.environ, "PYTHONDEVMODE": value} if value else None)
        for value in ("", "0")
    )
    assert (forked.returncode, forked.stdout, forked.stderr) == (started.returncode, started.stdout, started.stderr)


def test_environment_decides() -> None:
    """A forked process has the environment that it is given, and one that the interpreter reads is not forked."""
    setting = {**os.environ, "TOKENBUS_BUS_NO_SUCH": "1"}
    assert b"TOKENBUS_BUS_NO_SUCH" in run([COMMAND, "processor"], env=setting).stderr
    for command, variable in (([sys.executable, "-c", ""], {}), (WRONG, {"PYTHONDEVMODE": "0"})):
        started = start(command, {**os.environ, **variable})
        assert not isinstance(started, Forked)
        Program("it", started).wait()


def test_signal_is_the_status(tmp_path: Path) -> None:
    """A forked process gets signals, and its exit status says which one has ended it."""
    addresses = [f"--{which}-address=ipc://{tmp_path}/{which}" for which in ("workers", "clients")]
    process = start([COMMAND, "processor", *addresses, "--metrics-address="], is_merged=True)
    assert isinstance(process, Forked)
    program = Program("the processor", process)
    program.wait_for("listening")
    assert program.is_running
    program.kill()
    assert process.wait() == process.poll() == -signal.SIGKILL


@pytest.mark.nightly
def test_group_of_tests_runs_in_one_process(tmp_path: Path) -> None:
    """What `xdist_group` marks shares what is made once; the versions of pytest and pytest-xdist must agree on how."""
    (tmp_path / "test_group.py").write_text(
        "import os, pathlib, pytest\n"
        "pytestmark = pytest.mark.xdist_group('one')\n"
        "@pytest.mark.parametrize('number', range(12))\n"
        "def test_one(number): pathlib.Path(f'{os.getpid()}.pid').touch()\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "3", "--dist", "loadgroup", "-p", "no:schemathesis"]
    run = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
    assert len(list(tmp_path.glob("*.pid"))) == 1
