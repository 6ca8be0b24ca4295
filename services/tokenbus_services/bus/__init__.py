"""The bus: how messages get from one process to another, whatever carries them."""

from tokenbus_services.bus.errors import AddressError, BusError, ClosedError, MessageError
from tokenbus_services.bus.identity import ANONYMOUS, Identity, Role
from tokenbus_services.bus.memory import MemoryTransport
from tokenbus_services.bus.transport import Connection, Listener, Outcome, Parts, Transport, Usage
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
    "MemoryTransport",
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
    """Return the transport that carries what the settings' addresses name."""
    return ZeroMQTransport(settings)
