"""Progress of long work: one line on a terminal, which is written over, and nothing elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

_PERIOD = 0.1


class Progress:
    """Shows how far something is, now and then."""

    def __init__(self, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> None:
        """Take where to show it, standard error by default, and the time in seconds."""
        stream = sys.stderr if stream is None else stream
        self._stream = stream if stream is not None and stream.isatty() else None
        self._now = now
        self._next = 0.0
        self._width = 0

    def show(self, text: Callable[[], str]) -> None:
        """Show a text, which is asked for only when it is time."""
        if self._stream is None or (now := self._now()) < self._next:
            return
        self._next = now + _PERIOD
        self._put(text())

    def clear(self) -> None:
        """Take the line away, so that something else may stand there."""
        if self._stream is not None and self._width:
            self._put("")
            self._stream.write("\r")
            self._stream.flush()
            self._width = 0

    def _put(self, line: str) -> None:
        if self._stream is not None:
            self._stream.write("\r" + line.ljust(self._width))
            self._stream.flush()
            self._width = len(line)
