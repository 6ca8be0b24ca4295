"""The system's own programs, as the benchmarks start them and what they ask of them."""

import sys

_MAIN = "import sys; from tokenbus_services.cli import main; sys.exit(main())"
PROMPT = "In the evening the old man said"


def tokenbus(python: str = sys.executable) -> list[str]:
    """Return the command `tokenbus` of an interpreter, where its script need not be installed."""
    return [python, "-c", _MAIN]
