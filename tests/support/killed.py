"""A test that is killed or interrupted: tests/support/test_orphans.py starts it, in a pytest of its own."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support import orphans
from tests.support.nats import NatsServer

pytestmark = pytest.mark.process
STARTED = "STARTED"
"""The variable that names the file into which the test writes the run's folder and the processes that it started."""
_SLEEP = "import time; time.sleep(3600)"
_START = (
    f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {_SLEEP!r}]).pid, flush=True); {_SLEEP}"
)


def test_hangs(tmp_path: Path, folder: Path) -> None:
    """Start a server, and a process in a session of its own that starts another; leave files, and end never."""
    server = NatsServer(folder)
    other = subprocess.Popen([sys.executable, "-c", _START], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert other.stdout is not None
    inner = int(other.stdout.readline())
    for each in (tmp_path, tempfile.mkdtemp()):
        Path(each, "left").touch()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with Path(os.environ[STARTED]).open("w") as started:
        started.write(f"{os.environ[orphans.FOLDER]} {server.process.pid} {other.pid} {inner}\n")
    while True:
        signal.pause()
