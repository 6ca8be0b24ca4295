"""printable: untrusted text, made safe for terminals and logs."""


def printable(text: str) -> str:
    """Return text as one line, with all that is not printable escaped, surrogates too."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
