"""Colours on a terminal."""

import os
import sys

_CODES = {"green": "32", "red": "31", "bold": "1"}


def styled(text: str, style: str) -> str:
    """Return text in a style, if standard output is a terminal with colours. NO_COLOR is honoured."""
    has_colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if has_colours else text
