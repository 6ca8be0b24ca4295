"""Terminal output: colours and a progress line."""

import os
import sys
import time
from collections.abc import Callable
from shutil import get_terminal_size
from typing import TextIO

_CODES = {"green": "32", "red": "31", "bold": "1"}
_PERIOD = 0.1
_ERASE = "\r\x1b[K"


def styled(text: str, style: str) -> str:
    """Return text in a style if standard output is a terminal with colours. NO_COLOR disables styles."""
    has_colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if has_colours else text


class Progress:
    """A progress line, which is shown only on a terminal."""

    def __init__(self, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> None:
        stream = sys.stderr if stream is None else stream
        is_shown = stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
        self._stream = stream if is_shown else None
        self._now = now
        self._next = 0.0

    def show(self, text: str) -> None:
        """Show a text, at most ten times a second."""
        if self._stream is not None and (now := self._now()) >= self._next:
            self._next = now + _PERIOD
            line = text[: get_terminal_size().columns - 1]  # a wrapped line cannot be erased
            self._stream.write(_ERASE + line)
            self._stream.flush()

    def clear(self) -> None:
        """Erase the progress line."""
        if self._stream is not None and self._next:
            self._stream.write(_ERASE)
            self._stream.flush()
            self._next = 0.0
