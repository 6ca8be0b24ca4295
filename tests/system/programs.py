"""Processes that a test starts, listens to, stops and kills; each only through its own handle."""

import signal
import subprocess
import sys
import threading
from collections import deque
from contextlib import nullcontext
from types import TracebackType
from typing import IO, TypeVar

from tests.support.waiting import MOST

_LINES = 4096
_Self = TypeVar("_Self", bound="Program")


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Lines:
    """The last lines that a process wrote to one stream, and which of them a test has read."""

    def __init__(self) -> None:
        self._all: deque[str] = deque(maxlen=_LINES)
        self._unread: deque[str] = deque(maxlen=_LINES)
        self.news = threading.Condition()
        self.at_end = False

    def add(self, line: str) -> None:
        with self.news:
            self._all.append(line)
            self._unread.append(line)
            self.news.notify_all()

    def end(self) -> None:
        with self.news:
            self.at_end = True
            self.news.notify_all()

    def having(self, text: str) -> list[str]:
        with self.news:
            return [line for line in self._all if text in line]

    def read(self, stream: "IO[str] | None") -> None:
        with stream or nullcontext(()) as lines:
            for line in lines:
                self.add(line.rstrip("\n"))
        self.end()

    def next(self, text: str) -> "str | None":
        """Return the next line with a text, of those that were not read yet; the lines before it are read, too."""
        while self._unread:
            line = self._unread.popleft()
            if text in line:
                return line
        return None

    def rest(self) -> str:
        with self.news:
            self.news.wait_for(lambda: self.at_end, MOST)
        lines = list(self._unread)
        self._unread.clear()
        return "".join(f"{line}\n" for line in lines)


class Program:
    """A process that ends with the test, and what it has written."""

    def __init__(self, name: str, process: "subprocess.Popen[str]", patience: float = MOST) -> None:
        self.name = name
        self._patience = patience
        self._printed, self._complaints = Lines(), Lines()
        self.process, self.pid = process, process.pid
        self._readers = [
            threading.Thread(target=lines.read, args=(stream,), daemon=True)
            for lines, stream in ((self._printed, process.stdout), (self._complaints, process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self: _Self) -> _Self:  # noqa: PYI019 - Self is not in Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def output(self) -> str:
        return "\n".join(self.lines(""))

    def lines(self, text: str) -> list[str]:
        return self._printed.having(text)

    def wait_for(self, text: str, times: int = 1) -> str:
        """Return the line in which a text appears for the so-manieth time; fail if the process ends before."""
        printed = self._printed
        with printed.news:
            printed.news.wait_for(lambda: printed.at_end or len(self.lines(text)) >= times, self._patience)
            found = self.lines(text)
        if len(found) >= times:
            return found[times - 1]
        raise AssertionError(f"{self.name} did not write {text!r} {times} times; it wrote:\n{self.output}")

    def line(self, text: str) -> str:
        return self._next(self._printed, text)

    def complaint(self, text: str) -> str:
        """Return the next line of its errors, or its log, with a text in it; fail if it ends before."""
        return self._next(self._complaints, text)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> None:
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def terminate(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait()

    def wait(self, seconds: float | None = None) -> int:
        status = self.process.wait(seconds or self._patience)
        self._readers[0].join(seconds or self._patience)  # what it has started may write on
        return status

    def end(self) -> tuple[int, str, str]:
        """Wait for its end; return its exit status, and what was not read yet of its output and of its complaints."""
        return self.wait(), self._printed.rest(), self._complaints.rest()

    def _next(self, lines: Lines, text: str) -> str:
        found: list[str] = []

        def is_found() -> bool:
            found.extend(line for line in [lines.next(text)] if line is not None)
            return lines.at_end or bool(found)

        with lines.news:
            lines.news.wait_for(is_found, self._patience)
        if found:
            return found[0]
        raise AssertionError(f"{self.name} did not write {text!r} any more; it wrote:\n" + "\n".join(lines.having("")))
