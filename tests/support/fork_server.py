"""The process that has imported Tokenbus and forks the processes that tests/support/processes.py asks it for."""

import array
import gc
import importlib
import os
import pickle
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.support.settings import take_constants

COMMAND = str(Path(sys.executable).parent / "tokenbus")
_PRELOADED = (
    *(f"tokenbus.cli.{name}" for name in ("check", "gateway", "processor", "record", "tap")),
    "tokenbus.cli.worker",
    "tokenbus.engines.ngram",
    "tokenbus.engines.synthetic",
)
_MOST_BYTES, _FILES = 1 << 18, 4


class Request(NamedTuple):
    """A process to fork. With it come its standard input, output and error, and a socket for its id and its status."""

    command: list[str]
    environment: Mapping[str, str]
    folder: str


class _Child(NamedTuple):
    pid: int
    status: int


def serve(control: socket.socket) -> None:
    """Take requests until the tests' process ends, then kill all that was forked; a forked process runs its command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in (*_PRELOADED, *os.environ.get("TESTS_PRELOADED", "").split()):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    request = _forked_request(control)
    if request is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _run(request)


def _forked_request(control: socket.socket) -> Request | None:
    children: dict[int, _Child] = {}
    with control, selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in children:
                    selector.unregister(key.fd)
                    _report(key.fd, children.pop(key.fd))
                    continue
                data, files, _, _ = socket.recv_fds(control, _MOST_BYTES, _FILES)
                if not data:
                    for child in children.values():
                        os.kill(child.pid, signal.SIGKILL)
                    return None
                pid = os.fork()
                if pid == 0:
                    for descriptor, file in enumerate(files[:3]):
                        os.dup2(file, descriptor)
                    for file in [*files, *children, *(child.status for child in children.values())]:
                        os.close(file)
                    found: Request = pickle.loads(data)  # noqa: S301 - from the tests' process
                    return found
                *standard, status = files
                for file in standard:
                    os.close(file)
                _send(status, pid)
                ended = os.pidfd_open(pid)
                children[ended] = _Child(pid, status)
                selector.register(ended, selectors.EVENT_READ)


def _report(ended: int, child: _Child) -> None:
    _, status = os.waitpid(child.pid, 0)
    _send(child.status, os.waitstatus_to_exitcode(status))
    os.close(child.status)
    os.close(ended)


def _send(file: int, number: int) -> None:
    try:
        os.write(file, array.array("q", [number]).tobytes())
    except BrokenPipeError:  # the test does not want to know
        return


def _run(request: Request) -> None:
    os.environ.clear()
    os.environ.update(request.environment)
    take_constants(os.environ)
    os.chdir(request.folder)
    # They have found out what the fork server's own can do, which may be another kind of file.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    program, *arguments = request.command
    if program == COMMAND:
        sys.path[0] = str(Path(program).parent)
        sys.argv = request.command
        main = importlib.import_module("tokenbus.cli").main
        sys.exit(main())
    _, module, *rest = arguments  # python -m MODULE
    sys.path[0] = request.folder
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
