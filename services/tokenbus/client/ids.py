"""Random ids of requests, sessions and commands."""

import secrets


def random_id() -> int:
    """Return a random id from 1 to 2**64 - 1; the large range makes collisions and guesses improbable."""
    return secrets.randbits(64) or 1
