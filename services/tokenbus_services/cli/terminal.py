"""Colour where a person looks, plain text where a program reads."""

import os
import sys
from typing import TextIO

_CODES = {"green": "32", "red": "31", "yellow": "33", "bold": "1", "dim": "2"}


def styled(text: str, style: str, stream: TextIO | None = None) -> str:
    """Return text in a style if the stream is a terminal that wants it; NO_COLOR is honoured."""
    stream = stream or sys.stdout
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"
