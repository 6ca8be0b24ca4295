"""Processes that a test starts, listens to, stops and kills; each only through its own handle."""

import signal
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence

from tests.support.processes import start
from tests.support.waiting import MOST

_LINES = 4096


def tell(line: str) -> None:
    """Write a line for the test that started this process, at once: the process may be killed next."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Program:
    """A process; what it writes is read as it comes, so that it never waits for a reader."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a command; the name is for the message of a failure."""
        self.name = name
        self._process = start(command, environment, is_merged=True)
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._news = threading.Condition()
        self._at_end = False
        self._reader = threading.Thread(target=self._read, name=f"reads {self.name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    @property
    def output(self) -> str:
        """The last lines that it wrote."""
        with self._news:
            return "\n".join(self._lines)

    def lines(self, text: str) -> list[str]:
        """Return the lines so far in which a text appears."""
        with self._news:
            return [line for line in self._lines if text in line]

    def wait_for(self, text: str, times: int = 1) -> str:
        """Return the line in which a text appears for the so-manieth time; fail if the process ends before."""
        with self._news:
            self._news.wait_for(lambda: self._at_end or len(self.lines(text)) >= times, MOST)
            found = self.lines(text)
        if len(found) >= times:
            return found[times - 1]
        raise AssertionError(f"{self.name} did not write {text!r} {times} times; it wrote:\n{self.output}")

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._process.kill()
        self.wait()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
        self._process.send_signal(signal.SIGCONT)

    def terminate(self) -> int:
        """Ask it to end, and return its exit status."""
        self._process.terminate()
        return self.wait()

    def wait(self) -> int:
        """Return its exit status, once it has ended and all of its output is read."""
        status = self._process.wait(MOST)
        self._reader.join(MOST)
        return status

    def _read(self) -> None:
        stdout = self._process.stdout
        if stdout is None:
            return
        with stdout:
            for line in stdout:
                with self._news:
                    self._lines.append(line.rstrip("\n"))
                    self._news.notify_all()
        with self._news:
            self._at_end = True
            self._news.notify_all()
