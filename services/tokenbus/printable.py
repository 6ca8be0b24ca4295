"""Text for terminals and logs: what came from outside made safe, and the reasons of the system."""


def printable(text: str) -> str:
    """Return text as one line, with all that is not printable escaped, surrogates too."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def reason_of(error: OSError) -> str:
    """Return why the system refused something, in lower case."""
    return (error.strerror or str(error)).lower()
