"""Makes text safe for terminals and logs."""


def printable(text: str) -> str:
    """Return text as one line, with unprintable characters and surrogates escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def reason_of(error: OSError) -> str:
    """Return the system's error message in lower case."""
    return (error.strerror or str(error)).lower()
