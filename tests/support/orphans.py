"""No process and no temporary file of tests outlives them, whether they end, are interrupted or are killed.

Each process of the tests has a watcher, a process in a session of its own. What the tests start inherits a variable
with a mark, by which the watcher finds it, and what that has started in its turn. All temporary files of a run lie in
one folder, which the watcher of the run's first process removes.
"""

import os
import select
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

_VARIABLE = "ENDED_WITH_TESTS"
FOLDER = "FOLDER_OF_TESTS"
"""The variable that names the run's folder; its path is short enough for sockets in folders there."""
_LOOKS, _LOOK_SECONDS = 1000, 0.01
_EMPTY_LOOKS = 10
"""So often in a row nothing is found before all is gone: a process has no mark yet until it has become its program."""


@cache
def end_with_this_process() -> str:
    """Have everything that this process starts from now on killed when it ends, however it does.

    Temporary files lie in the run's folder from now on; return that, or nothing if another process has made it.
    """
    own = "" if FOLDER in os.environ else tempfile.mkdtemp(prefix="tb", dir="/tmp")
    os.environ["TMPDIR"] = tempfile.tempdir = os.environ.setdefault(FOLDER, own)
    mark = uuid.uuid4().hex
    # A watcher has no mark: killed by another one, it would watch no more.
    unmarked = {name: value for name, value in os.environ.items() if name != _VARIABLE}
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark, own]
    quiet = [(os.POSIX_SPAWN_OPEN, output, os.devnull, os.O_RDWR, 0) for output in range(3)]
    os.posix_spawn(sys.executable, command, unmarked, file_actions=quiet, setsid=True)
    # Behind the marks of the processes that have started this one: their watchers are to find all of it too.
    os.environ[_VARIABLE] = f"{os.environ.get(_VARIABLE, '')} {mark}".strip()
    return own


def _watch(pid: int, mark: str, folder: str) -> None:
    """Wait for the end of the process that started this one, kill what has its mark, and remove its folder."""
    with suppress(ProcessLookupError):
        watched = os.pidfd_open(pid)
        if os.getppid() == pid:  # else it has ended, and another may have its id
            select.select([watched], [], [])
    _kill_all(mark.encode())
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _kill_all(mark: bytes) -> None:
    empty = 0
    for _ in range(_LOOKS):
        found = list(_marked(mark))
        empty = 0 if found else empty + 1
        if empty == _EMPTY_LOOKS:
            return
        for each in found:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)


def _marked(mark: bytes) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or is another user's
            if mark in (folder / "environ").read_bytes():
                yield int(folder.name)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), *sys.argv[2:])
