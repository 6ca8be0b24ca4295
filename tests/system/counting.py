"""A transport that counts the items that go through it, and those that go through it again."""

from collections.abc import Callable

from tokenbus.bus import Connection, Listener, Parts, Transport
from tokenbus.bus.transport import ignore, ignore_loss
from tokenbus_contracts.generated.stream_pb2 import WorkerFrame

_ITEM_PARTS = 2


class CountingTransport:
    """Another transport, with a count of a worker's items."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._last = 0
        self.sent = 0
        self.sent_again = 0

    async def listen(self, address: str, refused: Callable[[str], None] = ignore) -> Listener:
        return await self._transport.listen(address, refused)

    async def connect(
        self, address: str, server_key: bytes | None = None, lost: Callable[[], None] = ignore_loss
    ) -> Connection:
        return _CountingConnection(await self._transport.connect(address, server_key, lost), self)

    def count(self, parts: Parts) -> None:
        if len(parts) == _ITEM_PARTS:
            sequence = WorkerFrame.FromString(parts[0]).item.sequence
            self.sent += 1
            self.sent_again += sequence <= self._last
            self._last = max(self._last, sequence)


class _CountingConnection:
    def __init__(self, connection: Connection, counts: CountingTransport) -> None:
        self._connection = connection
        self._counts = counts

    async def receive(self) -> list[bytes]:
        return await self._connection.receive()

    def send(self, parts: Parts) -> bool:
        sent = self._connection.send(parts)
        if sent:
            self._counts.count(parts)
        return sent

    async def close(self) -> None:
        await self._connection.close()
