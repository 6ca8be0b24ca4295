"""Command lines of the documents, run by a shell as a person would; nothing that they start outlives the test."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tests.cli.local import environment
from tests.pages import blocks
from tests.system.programs import Program

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
    own = environment(folder, **settings)
    return own | {"PATH": f"{_BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


class Shell(Program):
    """A shell in a folder that runs some command lines, in a group of its own that is gone after `with`."""

    def __init__(self, commands: str, folder: Path, given: Mapping[str, str]) -> None:
        process = subprocess.Popen(
            ["bash", "-c", f"exec 2>&1\n{commands}\n"],  # noqa: S607 - whichever the documents' reader has
            cwd=folder,
            env=dict(given),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        super().__init__("the shell", process, _LONGEST)

    def until_all(self, *texts: str) -> None:
        """Wait until each of some texts has appeared in a line, in whatever order."""
        missing = list(texts)
        while missing:
            found = self.line("")
            missing = [text for text in missing if text not in found]

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(self.pid, number)
