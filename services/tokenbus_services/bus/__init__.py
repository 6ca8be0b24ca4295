"""The bus: messages between processes, over any transport."""

import importlib.util
from collections.abc import Callable

from tokenbus_services.bus.addresses import is_nats
from tokenbus_services.bus.errors import AddressError, BusError, ClosedError, MessageError
from tokenbus_services.bus.memory import is_memory, shared
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
    ignore,
    ignore_loss,
    listen_once_there,
)
from tokenbus_services.bus.zeromq import ZeroMQTransport
from tokenbus_services.clock import Clock, SystemClock
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
    "clock_for",
    "listen_once_there",
    "require_nats",
    "transport_for",
]


class TransportByScheme:
    """Leaves each address to the transport of its scheme; NATS is imported when the first such address is used."""

    def __init__(self, settings: BusSettings) -> None:
        self._settings = settings
        self._zeromq = ZeroMQTransport(settings)
        self._nats: Transport | None = None

    async def listen(self, address: str, refused: Callable[[str], None] = ignore) -> Listener:
        """Listen at an address."""
        return await self._transport(address).listen(address, refused)

    async def connect(
        self, address: str, server_key: bytes | None = None, lost: Callable[[], None] = ignore_loss
    ) -> Connection:
        """Connect to an address."""
        return await self._transport(address).connect(address, server_key, lost)

    def _transport(self, address: str) -> Transport:
        if is_memory(address):
            transport = shared(address)
            if transport is None:
                raise AddressError(address, "no bus of tokenbus.testing in this process has it")
            return transport
        if not is_nats(address):
            return self._zeromq
        if self._nats is None:
            require_nats(address)
            from tokenbus_services.bus.nats import NatsTransport  # noqa: PLC0415 - an extra

            self._nats = NatsTransport(self._settings)
        return self._nats


def require_nats(address: str) -> None:
    """Raise an AddressError if what NATS needs is not installed."""
    if importlib.util.find_spec("nats") is None:
        raise AddressError(address, "nats-py is not installed (pip install 'tokenbus[nats]')")


def clock_for(address: str) -> Clock:
    """Return the clock of all that is connected at an address: the system's, but for a bus of tokenbus.testing."""
    transport = shared(address)
    return SystemClock() if transport is None else transport.clock


def transport_for(settings: BusSettings) -> Transport:
    """Return a transport for every address that a process may use."""
    return TransportByScheme(settings)
