"""Line: a peer's in-memory connection, on which a test can drop, repeat or hold messages."""

import asyncio
from collections import deque
from collections.abc import Callable

from tokenbus.bus import Connection, Listener, Parts
from tokenbus.bus.memory import MemoryConnection, MemoryTransport


class Line:
    """The connection of one peer to a processor, with faults that a test controls.

    `drop` and `repeat` affect the next messages, but never cause lost or repeated tokens.
    """

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport
        self._copies = {"sent": deque[int](), "received": deque[int]()}
        """Number of times that each of the next messages arrives: 0 for dropped and 2 for repeated messages."""
        self._open: list[_LineConnection] = []
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.is_dead = False
        """Whether the peer was lost, so that its messages no longer arrive."""

    def drop(self, *, sent: int = 0, received: int = 0) -> None:
        """Drop the next `sent` and `received` messages of the peer, then break the connection."""
        _check(sent, received)
        self._copies["sent"].extendleft([0] * sent)
        self._copies["received"].extendleft([0] * received)

    def repeat(self, *, sent: int = 0, received: int = 0) -> None:
        """Deliver the next `sent` and `received` messages of the peer twice."""
        _check(sent, received)
        self._copies["sent"].extend([2] * sent)
        self._copies["received"].extend([2] * received)

    def cut(self) -> None:
        """Break the connection and lose the messages in flight. The peer reconnects at once."""
        for connection in self._open:
            connection.cut()

    def hold(self) -> None:
        """Stop all messages in both directions until `release`."""
        self._flowing.clear()

    def release(self) -> None:
        """Deliver the held messages in order, and deliver later messages at once."""
        self._flowing.set()
        for connection in self._open:
            connection.flush()

    def copies(self, direction: str) -> int:
        """Return the number of times, 0 to 2, that the next message in a direction arrives."""
        following = self._copies[direction]
        copies = following.popleft() if following else 1
        if not copies and 0 not in following:
            asyncio.get_running_loop().call_soon(self.cut)
        return copies

    @property
    def is_held(self) -> bool:
        return not self._flowing.is_set()

    async def flows(self) -> None:
        """Wait until messages are no longer held."""
        await self._flowing.wait()

    # The interface of a transport.

    async def listen(self, address: str, refused: Callable[[str], None] = lambda _: None) -> Listener:
        """Listen at an address, without the faults of this connection."""
        return await self._transport.listen(address, refused)

    async def connect(self, address: str, lost: Callable[[], None] = lambda: None) -> Connection:
        connection = _LineConnection(self, await self._transport.connect(address, lost))
        self._open.append(connection)
        return connection

    def closed(self, connection: "_LineConnection") -> None:
        self._open.remove(connection)


def _check(*counts: int) -> None:
    if min(counts) < 0:
        raise ValueError(f"sent, received: at least 0, got {min(counts)}")


class _LineConnection:
    def __init__(self, line: Line, inner: MemoryConnection) -> None:
        self.inner = inner
        self._line = line
        self._held: deque[Parts] = deque()  # at most high_water_mark messages
        self._again: deque[list[bytes]] = deque()

    async def receive(self) -> list[bytes]:
        while not self._again:
            parts = await self.inner.receive()
            await self._line.flows()
            self._again += [parts] * self._line.copies("received")
        return self._again.popleft()

    def send(self, parts: Parts) -> bool:
        """Send without waiting. Return False if too many messages are in flight."""
        if self._line.is_dead:
            return True
        if not self._line.is_held:
            self.flush()
        if not self._line.is_held and not self._held:
            return self._send_copies(parts)
        if len(self._held) >= self.inner.high_water_mark:
            return False
        self._held.append(list(parts))
        return True

    def _send_copies(self, parts: Parts) -> bool:
        """Send a message 0 to 2 times. Return False if the connection is full."""
        if not self.inner.has_room(2):
            return False
        for _ in range(self._line.copies("sent")):
            self.inner.send(parts)
        return True

    def flush(self) -> None:
        """Send held messages until the connection is full."""
        while self._held and self._send_copies(self._held[0]):
            self._held.popleft()

    def cut(self) -> None:
        self._held.clear()
        self._again.clear()
        self.inner.cut()

    async def close(self) -> None:
        self._line.closed(self)
        await self.inner.close()
