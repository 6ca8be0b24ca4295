"""Printable: what comes from outside, as text that a terminal and a log can show."""


def printable(text: str) -> str:
    """Return text as one line that moves no cursor: what is not printable, surrogates included, is escaped."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
