"""Random ids of requests, sessions and commands."""

import secrets


def random_id() -> int:
    """Return a random id, from 1 to 2**64 - 1: with so large a range, nobody guesses an id or draws one twice."""
    return secrets.randbits(64) or 1
