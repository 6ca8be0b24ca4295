"""A forked process does what a started one does."""

import os
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
