"""A person's terminal: colours where it wants them, and a line of progress."""

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

_CODES = {"green": "32", "red": "31", "bold": "1"}


def wants_colour() -> bool:
    """Return whether standard output is a terminal that wants colours; NO_COLOR is honoured."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, style: str) -> str:
    """Return text in a style where colours are wanted."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if wants_colour() else text


_PERIOD = 0.1


class Progress:
    """Shows how far something is, now and then."""

    def __init__(self, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> None:
        stream = sys.stderr if stream is None else stream
        is_shown = stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
        self._stream = stream if is_shown else None
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
            # A line that goes on in the next row cannot be written over.
            shown = line[: _columns(self._stream) - 1]
            self._stream.write("\r" + shown.ljust(self._width))
            self._stream.flush()
            self._width = len(shown)


def _columns(stream: TextIO) -> int:
    """Return how wide a terminal is now; where it does not say, as wide as any line."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or sys.maxsize
    except OSError:
        return sys.maxsize
