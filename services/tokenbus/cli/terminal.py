"""Terminal output: colours and a progress line."""

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

_CODES = {"green": "32", "red": "31", "bold": "1"}
_PERIOD = 0.1


def styled(text: str, style: str) -> str:
    """Return text in a style, if standard output is a terminal with colours. NO_COLOR is honoured."""
    has_colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if has_colours else text


class Progress:
    """A progress line on a terminal; shows nothing elsewhere."""

    def __init__(self, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> None:
        stream = sys.stderr if stream is None else stream
        is_shown = stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
        self._stream = stream if is_shown else None
        self._now = now
        self._next = 0.0
        self._width = 0

    def show(self, text: Callable[[], str]) -> None:
        """Show the result of `text`, which is called at most ten times a second."""
        if self._stream is None or (now := self._now()) < self._next:
            return
        self._next = now + _PERIOD
        self._put(text())

    def clear(self) -> None:
        """Erase the line."""
        if self._stream is not None and self._width:
            self._put("")
            self._stream.write("\r")
            self._stream.flush()
            self._width = 0

    def _put(self, line: str) -> None:
        if self._stream is not None:
            shown = line[: _columns(self._stream) - 1]  # a wrapped line could not be overwritten
            self._stream.write("\r" + shown.ljust(self._width))
            self._stream.flush()
            self._width = len(shown)


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or sys.maxsize
    except OSError:
        return sys.maxsize
