"""The bus: messages between processes, over any transport."""

from collections.abc import Callable

from tokenbus.bus.errors import AddressError, BusError, ClosedError, MessageError
from tokenbus.bus.memory import is_memory, shared
from tokenbus.bus.transport import (
    ANONYMOUS,
    Connection,
    Identity,
    Listener,
    Outcome,
    Parts,
    Role,
    Transport,
    Usage,
    ignore,
    ignore_loss,
)
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


class TransportByScheme:
    """Leaves each address to the transport of its scheme."""

    def __init__(self, settings: BusSettings) -> None:
        self._zeromq = ZeroMQTransport(settings)

    async def listen(self, address: str, refused: Callable[[str], None] = ignore) -> Listener:
        """Listen at an address."""
        return await self._transport(address).listen(address, refused)

    async def connect(
        self, address: str, server_key: bytes | None = None, lost: Callable[[], None] = ignore_loss
    ) -> Connection:
        """Connect to an address."""
        return await self._transport(address).connect(address, server_key, lost)

    def _transport(self, address: str) -> Transport:
        if not is_memory(address):
            return self._zeromq
        transport = shared(address)
        if transport is None:
            raise AddressError(address, "no bus of tokenbus.testing in this process has it")
        return transport


def clock_for(address: str) -> Clock:
    """Return the clock of all that is connected at an address: the system's, but for a bus of tokenbus.testing."""
    transport = shared(address)
    return SystemClock() if transport is None else transport.clock


def transport_for(settings: BusSettings) -> Transport:
    """Return a transport for every address that a process may use."""
    return TransportByScheme(settings)
