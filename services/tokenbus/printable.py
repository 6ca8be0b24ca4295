"""Makes text safe for terminals and logs."""


def printable(text: str) -> str:
    """Return text as one line, with unprintable characters and surrogates escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def reason_of(error: Exception) -> str:
    """Return the operating system's message for an error, or else the error's text, in lower case."""
    return (getattr(error, "strerror", None) or str(error)).lower()
