"""Command lines of the documents, run by a shell as a person would; nothing that they start outlives the test."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import NamedTuple, Self

from tests.pages import blocks
from tests.services.cli.local import environment

_BIN = Path(sys.executable).parent
_LONGEST = 120.0  # seconds, after which what still runs is killed, and a test that waits has failed
_COMMENT = re.compile(r"\s{2,}# .*$", re.MULTILINE)


class Line(NamedTuple):
    """One command line of a page, and what the page says that it prints."""

    page: str
    command: str
    printed: str


def command_lines(page: str = "") -> Iterator[Line]:
    """Yield the command lines of a page, or of all, without the comments behind them."""
    for block in blocks("console", of=page):
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command = re.match(r"(?:.*\\\n)*.*", part)
            if command is None:
                raise AssertionError(part)
            yield Line(block.page, _COMMENT.sub("", command[0]).strip(), part[command.end() :].lstrip("\n"))


def line(page: str, begin: str) -> Line:
    """Return the one command line of a page that begins so."""
    (found,) = [each for each in command_lines(page) if each.command.startswith(begin)]
    return found


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port that is given only to a process that asks for its number."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def variables(folder: Path, **settings: object) -> dict[str, str]:
    """Return the environment of a shell that finds `tokenbus`, with settings of a test's own."""
    own = environment(folder, **settings)
    return own | {"PATH": f"{_BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


class Shell:
    """A shell in a folder that runs some command lines, in a group of its own that is gone after `with`."""

    def __init__(self, commands: str, folder: Path, given: Mapping[str, str]) -> None:
        """Start it; what it prints and what it logs come as one."""
        self.process = subprocess.Popen(
            ["bash", "-c", f"exec 2>&1\n{commands}\n"],  # noqa: S607 - whichever the documents' reader has
            cwd=folder,
            env=dict(given),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._guard = threading.Timer(_LONGEST, self._kill)  # a line that never comes must not hang the tests
        self._guard.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._guard.cancel()
        self._kill()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.process.wait()

    def until(self, text: str) -> str:
        """Return the next line in which a text appears."""
        for printed in self.process.stdout or ():
            self.lines.append(printed.rstrip("\n"))
            if text in printed:
                return self.lines[-1]
        raise AssertionError(f"it ended without {text!r}: {self.lines}")

    def until_all(self, *texts: str) -> None:
        """Wait until each of some texts has appeared in a line, in whatever order."""
        missing = list(texts)
        while missing:
            found = self.until("")
            missing = [text for text in missing if text not in found]

    def signal(self, number: Signals) -> None:
        """Send all of it a signal, as a terminal does for Ctrl-C."""
        os.killpg(self.process.pid, number)

    def end(self) -> tuple[int, str]:
        """Wait for its end; return its exit status, and what it printed since the last line that was waited for."""
        printed, _ = self.process.communicate()
        return self.process.returncode, printed

    def _kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # all of it has ended
            return
