"""What may reach a person's terminal: colour where one looks, and nothing unprintable from outside."""

import os
import sys

_CODES = {"green": "32", "red": "31", "bold": "1"}


def styled(text: str, style: str) -> str:
    """Return text in a style if standard output is a terminal that wants it; NO_COLOR is honoured."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"


def printable(text: str) -> str:
    """Return text as one line that moves no cursor: what is not printable, surrogates included, is escaped."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
