"""The durable log: every worker's stream in a JetStream stream, written once and read by any number of readers."""

import importlib.util

from tokenbus.bus import AddressError

__all__ = ["require_nats"]


def require_nats(address: str) -> None:
    """Raise an AddressError if nats-py is not installed."""
    if importlib.util.find_spec("nats") is None:
        raise AddressError(address, "nats-py is not installed (pip install 'tokenbus[nats]')")
