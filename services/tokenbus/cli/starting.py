"""What a service that starts shows of itself: signs that it does something, and what it wrote, should it fail."""

import os
import re
from collections import Counter, deque
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

    def __init__(self, session: int, now: float, proc: Path = _PROC) -> None:
        self._session = session
        self._proc = proc
        self._at = now
        self._lines = 0
        self._ticks, self._bytes = self._used()

    def seen(self, lines: int, now: float) -> bool:
        """Return whether there was a sign since it was asked last; `lines` is how many it has written."""
        passed, self._at = max(now - self._at, 1e-9), now
        (ticks, read), before = self._used(), (self._ticks, self._bytes, self._lines)
        self._ticks, self._bytes, self._lines = ticks, read, lines
        # By process, and without falls: one that has ended must not hide what the others do.
        computes = (ticks - before[0]).total() / os.sysconf("SC_CLK_TCK") >= _LEAST_SHARE * passed
        return lines > before[2] or computes or (read - before[1]).total() >= _LEAST_BYTES * passed

    def _used(self) -> tuple[Counter[str], Counter[str]]:
        """Return the processor time in ticks and the bytes that each process has used; none where there is no /proc."""
        ticks, read = Counter[str](), Counter[str]()
        for process in self._processes():
            with suppress(OSError, ValueError, IndexError):
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == self._session:
                    which = f"{process.name} {fields[19]}"  # since when it runs: a later process may have its number
                    ticks[which] = int(fields[11]) + int(fields[12])
                    read[which] = _bytes_read(process)
        return ticks, read

    def _processes(self) -> Iterator[Path]:
        if self._proc.is_dir():
            yield from (each for each in self._proc.iterdir() if each.name.isdecimal())


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
