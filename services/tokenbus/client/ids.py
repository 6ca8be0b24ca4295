"""Random ids of requests, sessions and commands."""

import secrets


def random_id() -> int:
    """Return a random id, from 1 to 2**64 - 1: too many to guess one or to draw one twice."""
    return secrets.randbits(64) or 1
