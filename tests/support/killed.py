"""Tests that are killed while servers run: tests/support/test_orphans.py starts them, in a pytest of their own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.nats import NatsServer

pytestmark = pytest.mark.process
STARTED = "STARTED"
"""The variable that names the file into which a test writes the processes that it started."""


def _start() -> None:
    sleep = "import time; time.sleep(3600)"
    start = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {sleep!r}]).pid, flush=True); {sleep}"
    )
    other = subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert other.stdout is not None
    inner = int(other.stdout.readline())
    started = Path(os.environ[STARTED])
    started.write_text(f"{NatsServer(started.parent).process.pid} {other.pid} {inner}")


def test_worker_is_killed() -> None:
    _start()
    os.kill(os.getpid(), signal.SIGKILL)


def test_controller_is_killed() -> None:
    """The process that started those that run the tests is killed, and one of those hangs."""
    _start()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.kill(os.getppid(), signal.SIGKILL)
    while True:
        signal.pause()
