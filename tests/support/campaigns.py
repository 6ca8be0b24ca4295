"""How long a campaign is: short in every run of the tests, long in `make soak`, which sets SOAK."""

import os

IS_SOAK = bool(os.environ.get("SOAK"))


def many(long: int, short: int) -> int:
    """Return how many examples, messages or steps a campaign has."""
    return long if IS_SOAK else short
