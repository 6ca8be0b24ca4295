"""The bus: messages between processes, over any transport."""

from tokenbus_services.bus.errors import AddressError, BusError, ClosedError, MessageError
from tokenbus_services.bus.transport import (
    ANONYMOUS,
    Connection,
    Identity,
    Listener,
    Outcome,
    Parts,
    Role,
    Transport,
    Usage,
)
from tokenbus_services.bus.zeromq import ZeroMQTransport
from tokenbus_services.settings import BusSettings

__all__ = [
    "ANONYMOUS",
    "AddressError",
    "BusError",
    "ClosedError",
    "Connection",
    "Identity",
    "Listener",
    "MessageError",
    "Outcome",
    "Parts",
    "Role",
    "Transport",
    "Usage",
    "ZeroMQTransport",
    "transport_for",
]


def transport_for(settings: BusSettings) -> Transport:
    """Return the transport for the addresses of the settings."""
    return ZeroMQTransport(settings)
