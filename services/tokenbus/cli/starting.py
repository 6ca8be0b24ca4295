"""What a service that starts shows of itself: signs that it does something, and what it wrote, should it fail."""

import os
import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_LEAST_SHARE, _LEAST_BYTES = 0.05, 1_000_000
"""Of a processor's time, and of what is read each second: a process that only waits does less."""
_MOST_LINES, _LAST_LINES, _MOST_CAUSES = 1000, 40, 10
_MOST_CHARACTERS = 500
_RAISED = re.compile(r"(?:^|[\s\]])(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Killed)\b: *\S")
"""The last line of a traceback, with or without what a logger writes before it."""


class SignsOfLife:
    """Tells whether the processes of a session do something: write, compute or read from disks."""

    def __init__(self, session: int, now: float) -> None:
        self._session = session
        self._at = now
        self._lines = 0
        self._seconds, self._bytes = self._used()

    def seen(self, lines: int, now: float) -> bool:
        """Return whether there was a sign since it was asked last; `lines` is how many it has written."""
        passed, self._at = max(now - self._at, 1e-9), now
        (seconds, read), before = self._used(), (self._seconds, self._bytes, self._lines)
        self._seconds, self._bytes, self._lines = seconds, read, lines
        computes = seconds - before[0] >= _LEAST_SHARE * passed
        return lines > before[2] or computes or read - before[1] >= _LEAST_BYTES * passed

    def _used(self) -> tuple[float, int]:
        """Return the processor time and the bytes that its processes have used; zeros where there is no /proc."""
        ticks = read = 0
        for process in self._processes():
            with suppress(OSError, ValueError, IndexError):
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == self._session:
                    ticks += int(fields[11]) + int(fields[12])
                    read += _bytes_read(process)
        return ticks / os.sysconf("SC_CLK_TCK"), read

    @staticmethod
    def _processes() -> Iterator[Path]:
        if _PROC.is_dir():
            yield from (each for each in _PROC.iterdir() if each.name.isdecimal())


def _bytes_read(process: Path) -> int:
    with suppress(OSError):
        for line in (process / "io").read_text().splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    return 0


class Output:
    """What a service wrote beside its log, as its libraries do."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)

    def add(self, line: str) -> None:
        """Keep a line."""
        if line:
            self._lines.append(line[:_MOST_CHARACTERS])

    def take(self) -> list[str]:
        """Return the last lines and, of those before, the ones that name an error; and forget them all."""
        lines = list(self._lines)
        self._lines.clear()
        before, last = lines[:-_LAST_LINES], lines[-_LAST_LINES:]
        causes = list(dict.fromkeys(line for line in before if _RAISED.search(line)))[:_MOST_CAUSES]
        return [*causes, "...", *last] if before else last
