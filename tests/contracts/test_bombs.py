"""The decoder takes little memory, whatever a message claims: in a real process, whose memory has a limit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("pure_python", ["", pytest.param("1", marks=pytest.mark.nightly)])
def test_messages_that_are_built_to_cost_much_take_little_memory(pure_python: str) -> None:
    command = [sys.executable, "-W", "error", "-m", "tests.contracts.bombs"]
    environment = os.environ | {"TOKENBUS_PURE_PYTHON": pure_python}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
