"""Start `tokenbus` and modules of the tests by a fork of a process that has the imports: in 0.03 s instead of 0.6 s.

Each process of the tests has one fork server. It ends with that process, and kills what it has forked. A forked process
differs from a started one only in what the interpreter and libraries read at their start. A command whose environment
differs there is therefore started, and so is every other program.
"""

import array
import atexit
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, cast

from tests.support.fork_server import COMMAND, Request

FORK = "tests.fork"
"""The audit event of a fork."""
_ROOT = Path(__file__).resolve().parents[2]
_SERVER = "import os, socket; from tests.support.fork_server import serve; serve(socket.socket(fileno=os.dup(0)))"
_READ_AT_START = (
    "LANG", "LC_", "LD_", "MALLOC_", "OPENBLAS_", "PYTHON", "TOKENBUS_FASTDEPLOY", "TOKENBUS_PURE",
)  # fmt: skip
"""The first letters of the variables that the interpreter and libraries read at their start."""


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}
    found.pop("PYTHONDONTWRITEBYTECODE", None)  # tests/conftest.py removes it
    return found


_AT_START = _read_at_start(os.environ)


class Forked:
    """A forked process, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, request: Request, files: Sequence[int]) -> None:
        sys.audit(FORK, request.command)
        self.args = request.command
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        self.returncode: int | None = None
        self._receiving = threading.Lock()
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        weakref.finalize(self, self._status.close)
        with theirs:
            socket.send_fds(_control(), [pickle.dumps(request)], [*files, theirs.fileno()])
        self.pid = self._receive()

    def poll(self) -> int | None:
        """Return its exit status, the negative number of the signal that ended it, or None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        with self._receiving:
            if self.returncode is None:
                self.returncode = self._receive()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _receive(self) -> int:
        received = self._status.recv(8)
        if not received:
            raise RuntimeError("the fork server has ended")
        return int(array.array("q", received)[0])


def start(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    is_merged: bool = False,
    folder: "Path | None" = None,
) -> "subprocess.Popen[str]":
    """Start a command that has no input; `stdout` and `stderr` read its output and its errors, or `stdout` both."""
    environment = os.environ if env is None else env
    if not _is_forkable(command, environment):
        return subprocess.Popen(
            command,
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if is_merged else subprocess.PIPE,
            text=True,
        )
    with ExitStack() as stack:
        nothing = stack.enter_context(_closing(os.open(os.devnull, os.O_RDONLY)))
        pipes = [os.pipe() for _ in range(1 if is_merged else 2)]
        written = [stack.enter_context(_closing(end)) for _, end in pipes]
        forked = Forked(_request(command, environment, folder), [nothing, written[0], written[-1]])
    streams = [os.fdopen(end, encoding="utf-8") for end, _ in pipes]
    forked.stdout = streams[0]
    forked.stderr = None if is_merged else streams[1]
    return cast("subprocess.Popen[str]", forked)


def run(  # noqa: PLR0913 - those of subprocess.run
    command: Sequence["str | bytes | Path"],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    input: bytes = b"",  # noqa: A002 - its name there
    text: bool = False,
    timeout: float | None = None,
) -> "subprocess.CompletedProcess[Any]":
    """Run a command to its end, and return it with its output and its errors, as `subprocess.run` does."""
    words = [os.fsdecode(word) for word in command]
    environment = os.environ if env is None else env
    with ExitStack() as stack:
        given, *written = (stack.enter_context(_closing(os.memfd_create("tests"))) for _ in range(3))
        os.write(given, input)
        os.lseek(given, 0, os.SEEK_SET)
        process: Forked | subprocess.Popen[bytes]
        if _is_forkable(words, environment):
            process = Forked(_request(words, environment, cwd), [given, *written])
        else:
            output, errors = written
            process = subprocess.Popen(words, env=environment, cwd=cwd, stdin=given, stdout=output, stderr=errors)
        try:
            status = process.wait(timeout)
        except BaseException:
            process.kill()
            process.wait()
            raise
        outputs = [os.pread(file, os.fstat(file).st_size, 0) for file in written]
    return subprocess.CompletedProcess(words, status, *([each.decode() for each in outputs] if text else outputs))


def _request(command: Sequence[str], environment: Mapping[str, str], folder: "Path | None" = None) -> Request:
    return Request(list(command), dict(environment), str(folder or Path.cwd()))


def _is_forkable(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    is_module = list(command[:2]) == [sys.executable, "-m"] and command[2].startswith("tests.")
    return (command[0] == COMMAND or is_module) and _read_at_start(environment) == _AT_START


@contextmanager
def _closing(file: int) -> Iterator[int]:
    try:
        yield file
    finally:
        os.close(file)


@cache
def _control() -> socket.socket:
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    others = {name: value for name, value in os.environ.items() if not name.startswith(_READ_AT_START)}
    command = [sys.executable, "-c", _SERVER]
    with theirs:
        server = subprocess.Popen(command, cwd=_ROOT, env=others | _AT_START, stdin=theirs.fileno())
    atexit.register(server.wait)
    atexit.register(control.close)
    return control
