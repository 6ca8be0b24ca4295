"""A transport whose connections fail for good."""

from tokenbus_services.bus.memory import MemoryConnection, MemoryTransport


class Breaking(MemoryConnection):
    """A connection that fails when something is sent."""

    def send(self, parts: object) -> bool:
        """Fail."""
        raise RuntimeError(parts)


class BreakingTransport(MemoryTransport):
    """A transport whose connections fail."""

    async def connect(self, address: str, server_key: bytes | None = None) -> MemoryConnection:
        """Connect."""
        del server_key
        return Breaking(self._meeting(address), self._settings)
