"""Transports that fail for good."""

from collections.abc import Callable

from tokenbus.bus import AddressError
from tokenbus.bus.memory import MemoryConnection, MemoryTransport


class Breaking(MemoryConnection):
    def send(self, parts: object) -> bool:
        raise RuntimeError(parts)


class BreakingTransport(MemoryTransport):
    async def connect(self, address: str, lost: Callable[[], None] = lambda: None) -> MemoryConnection:
        return Breaking(self._meeting(address), self._settings, lost)


class UselessTransport(MemoryTransport):
    async def connect(self, address: str, lost: Callable[[], None] = lambda: None) -> MemoryConnection:
        del lost
        raise AddressError(address, "of no use")
