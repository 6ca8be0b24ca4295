"""The durable log: the streams of all workers in one JetStream stream, for any number of readers."""

import importlib.util

from tokenbus.bus import AddressError


def require_nats(address: str) -> None:
    if importlib.util.find_spec("nats") is None:
        raise AddressError(address, "nats-py is not installed (pip install 'tokenbus[nats]')")
