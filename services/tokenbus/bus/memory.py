"""MemoryTransport: a transport within one event loop that loses no message."""

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import Callable
from itertools import count

from tokenbus.bus.errors import AddressError, ClosedError
from tokenbus.bus.transport import ANONYMOUS, Identity, Outcome, Parts, ReceiveBudget, Usage, check_message
from tokenbus.clock import Clock, SystemClock
from tokenbus.settings import BusSettings

SHARED: dict[str, "MemoryTransport"] = {}
"""Transports that `transport_for` returns, by address."""
_ADDRESS = re.compile(r"memory://[\w.-]+")


class MemoryTransport:
    """Connects listeners and connections that use one transport object and the same address `memory://NAME`."""

    def __init__(self, settings: BusSettings, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self._settings = settings
        self._meetings: dict[str, _Meeting] = {}

    @property
    def messages(self) -> int:
        return sum(meeting.messages for meeting in self._meetings.values())

    def crash(self, address: str) -> None:
        """Break the connections of the listener at an address, as if the listener's process had died."""
        listener = self._meeting(address).listener
        if listener is not None:
            listener.crash()

    async def listen(self, address: str, refused: Callable[[str], None] = lambda _: None) -> "MemoryListener":
        """Listen at an address that has no listener yet; this transport never calls `refused`."""
        del refused
        meeting = self._meeting(address)
        if meeting.listener is not None:
            raise AddressError(address, "taken: something listens there already")
        return MemoryListener(meeting, self._settings)

    async def connect(self, address: str, lost: Callable[[], None] = lambda: None) -> "MemoryConnection":
        return MemoryConnection(self._meeting(address), self._settings, lost)

    def _meeting(self, address: str) -> "_Meeting":
        if not _ADDRESS.fullmatch(address):
            raise AddressError(address, "expected memory://NAME, of letters, digits and . _ -")
        return self._meetings.setdefault(address, _Meeting(address))


class _Meeting:
    """The listener and the connections of one address."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.listener: MemoryListener | None = None
        self.connections: list[MemoryConnection] = []
        self.ids = count(1)
        self.messages = 0

    def introduce(self, connection: "MemoryConnection") -> None:
        if self.listener is not None:
            connection.peer = b"peer-%d" % next(self.ids)
            self.listener.peers[connection.peer] = connection
            if connection.outgoing:
                self.listener.notice(connection)


class MemoryListener:
    """The listener at one address."""

    def __init__(self, meeting: _Meeting, settings: BusSettings) -> None:
        self.address = meeting.address
        self._max_part_bytes = settings.max_part_bytes
        self._meeting = meeting
        self.peers: dict[bytes, MemoryConnection] = {}
        self._ready: deque[MemoryConnection] = deque()  # connections with unread messages, each at most once
        self._readable = asyncio.Event()
        self.budget = ReceiveBudget()
        self._closed = False
        meeting.listener = self
        for connection in meeting.connections:
            meeting.introduce(connection)

    async def receive(self) -> tuple[bytes, list[bytes]]:
        await self.budget.next()
        while not self._ready:
            self._check_open()
            self.budget.before_pause()
            self._readable.clear()
            await self._readable.wait()
        self._check_open()
        connection = self._ready.popleft()
        parts = connection.outgoing.popleft()
        if connection.outgoing:
            self._ready.append(connection)
        return connection.peer, parts

    def send(self, peer: bytes, parts: Parts) -> Outcome:
        self._check_open()
        check_message(parts, self._max_part_bytes)
        connection = self.peers.get(peer)
        if connection is None:
            return Outcome.GONE
        return Outcome.SENT if connection.deliver(list(parts)) else Outcome.FULL

    def identity(self, peer: bytes) -> Identity:
        del peer
        return ANONYMOUS

    def is_connected(self, peer: bytes) -> bool:
        return peer in self.peers

    def admit(self, peer: bytes) -> None:
        """Do nothing, because this transport never disconnects silent peers."""

    def disconnect(self, peer: bytes) -> None:
        """Disconnect a peer; its connection becomes a new peer at once."""
        connection = self.peers.pop(peer, None)
        if connection is not None:
            connection.outgoing.clear()
            with contextlib.suppress(ValueError):
                self._ready.remove(connection)
            connection.lost()
            self._meeting.introduce(connection)

    def is_reachable(self) -> bool:
        return self._meeting.listener is self

    def usage(self) -> Usage:
        return Usage()

    async def close(self) -> None:
        """Close the listener; unread messages wait for the next listener at this address."""
        if not self._closed:
            self._closed = True
            self._meeting.listener = None
            self._readable.set()
            for connection in self.peers.values():
                connection.lost()

    def crash(self) -> None:
        lost = list(self.peers.values())
        self.peers.clear()
        self._ready.clear()
        for connection in lost:
            connection.outgoing.clear()
            connection.lost()

    def notice(self, connection: "MemoryConnection") -> None:
        self._ready.append(connection)
        self._readable.set()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"listener at {self.address}")


class MemoryConnection:
    """A connection to the listener at one address."""

    def __init__(self, meeting: _Meeting, settings: BusSettings, lost: Callable[[], None]) -> None:
        self.peer = b""
        self.lost = lost
        self.outgoing: deque[list[bytes]] = deque()  # messages to the listener; `send` bounds their number
        self._incoming: deque[list[bytes]] = deque()  # messages from the listener; `deliver` bounds their number
        self.high_water_mark = settings.high_water_mark
        self._max_part_bytes = settings.max_part_bytes
        self._meeting = meeting
        self._readable = asyncio.Event()
        self._budget = ReceiveBudget()
        self._closed = False
        meeting.connections.append(self)
        meeting.introduce(self)

    async def receive(self) -> list[bytes]:
        await self._budget.next()
        while not self._incoming:
            self._check_open()
            self._readable.clear()
            await self._readable.wait()
        self._check_open()
        return self._incoming.popleft()

    def send(self, parts: Parts) -> bool:
        self._check_open()
        check_message(parts, self._max_part_bytes)
        if not self.has_room(1):
            return False
        self._meeting.messages += 1
        self.outgoing.append(list(parts))
        if len(self.outgoing) == 1 and self._meeting.listener is not None:
            self._meeting.listener.notice(self)
        return True

    async def close(self) -> None:
        """Close the connection; the listener still receives the messages that were sent."""
        if not self._closed:
            self._closed = True
            self._meeting.connections.remove(self)
            if self._meeting.listener is not None:
                self._meeting.listener.peers.pop(self.peer, None)
            self._readable.set()

    def has_room(self, messages: int) -> bool:
        return len(self.outgoing) + messages <= self.high_water_mark

    def cut(self) -> None:
        """Break the connection and drop its messages; the listener sees a new peer at once."""
        self._incoming.clear()
        if self._meeting.listener is not None:
            self._meeting.listener.disconnect(self.peer)

    def deliver(self, parts: list[bytes]) -> bool:
        """Queue a message from the listener, or return False if the queue is full."""
        if len(self._incoming) >= self.high_water_mark:
            return False
        self._meeting.messages += 1
        self._incoming.append(parts)
        self._readable.set()
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"connection to {self._meeting.address}")
