"""A person's terminal: how wide it is, and colours where it wants them."""

import os
import shutil
import sys

_CODES = {"green": "32", "red": "31", "bold": "1"}


def wants_colour() -> bool:
    """Return whether standard output is a terminal that wants colours; NO_COLOR is honoured."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def columns() -> int:
    """Return how wide the terminal is; where there is none, wide enough for any line."""
    return shutil.get_terminal_size((sys.maxsize, 24)).columns if sys.stdout.isatty() else sys.maxsize


def styled(text: str, style: str) -> str:
    """Return text in a style where colours are wanted."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if wants_colour() else text
