"""The bus carries messages between processes over any transport."""

from tokenbus.bus.errors import AddressError, BusError, ClosedError, MessageError
from tokenbus.bus.memory import SHARED
from tokenbus.bus.transport import ANONYMOUS, Connection, Identity, Listener, Outcome, Parts, Role, Transport, Usage
from tokenbus.bus.zeromq import ZeroMQTransport
from tokenbus.clock import Clock, SystemClock
from tokenbus.settings import BusSettings

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
    "clock_for",
    "transport_for",
]


def clock_for(address: str) -> Clock:
    """Return the clock for an address: the test bus's clock for a memory address, otherwise the system clock."""
    transport = SHARED.get(address)
    return SystemClock() if transport is None else transport.clock


def transport_for(settings: BusSettings, address: str) -> Transport:
    """Return a transport for an address; raises AddressError for a memory address without a test bus."""
    if not address.startswith("memory://"):
        return ZeroMQTransport(settings)
    transport = SHARED.get(address)
    if transport is None:
        raise AddressError(address, "no bus of tokenbus.testing in this process has it")
    return transport
