"""ChildProcess: a process that this one has started; a thread reads its output, so that it never waits for a reader."""

import subprocess
import threading
from collections.abc import Callable

_LONGEST_LINE = 1_048_576
"""A longer one is given in pieces."""


class ChildProcess:
    """Reads a process's output until it ends, and sends it signals."""

    def __init__(
        self, process: "subprocess.Popen[str]", on_line: Callable[[str], object], on_end: Callable[[int], object]
    ) -> None:
        """Give each line of its output to `on_line`, and then its exit status to `on_end`, both in a thread."""
        self.pid = process.pid
        self.process = process
        self._on_line = on_line
        self._on_end = on_end
        self._listener = threading.Thread(target=self._listen, name=f"reads process {self.pid}", daemon=True)
        self._listener.start()

    def signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        self.process.send_signal(number)

    def wait(self, seconds: float) -> int:
        """Return its exit status, once it has ended and its output is read; raises a subprocess.TimeoutExpired."""
        status = self.process.wait(seconds)
        self._listener.join(seconds)  # what it has started may write on
        return status

    def _listen(self) -> None:
        if self.process.stdout is not None:
            with self.process.stdout as stream:
                while line := stream.readline(_LONGEST_LINE):
                    self._on_line(line.rstrip("\n"))
        status = self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._on_end(status)
