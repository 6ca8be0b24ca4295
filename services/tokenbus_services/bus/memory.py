"""A transport within one event loop, for tests and for everything in one process; it loses nothing."""

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import Callable
from itertools import count

from tokenbus_services.bus.errors import AddressError, ClosedError
from tokenbus_services.bus.identity import ANONYMOUS, Identity
from tokenbus_services.bus.transport import AdmissionLimiter, Outcome, Parts, Usage, check_message, ignore
from tokenbus_services.settings import BusSettings

_ADDRESS = re.compile(r"memory://[\w.-]+")


class MemoryTransport:
    """Listeners and connections that find each other by `memory://NAME`, within one object of this class."""

    def __init__(self, settings: BusSettings) -> None:
        """Take the bounds from the settings."""
        self._settings = settings
        self._meetings: dict[str, _Meeting] = {}

    async def listen(self, address: str, refused: Callable[[str], None] = ignore) -> "MemoryListener":
        """Listen under a name that nobody listens under; nothing is ever refused."""
        del refused
        meeting = self._meeting(address)
        if meeting.listener is not None:
            raise AddressError(address, "taken: something listens there already")
        return MemoryListener(meeting, self._settings)

    async def connect(self, address: str, server_key: bytes | None = None) -> "MemoryConnection":
        """Connect to a name; no keys are asked for."""
        del server_key
        return MemoryConnection(self._meeting(address), self._settings)

    def _meeting(self, address: str) -> "_Meeting":
        if not _ADDRESS.fullmatch(address):
            raise AddressError(address, "expected memory://NAME, of letters, digits and . _ -")
        return self._meetings.setdefault(address, _Meeting(address))


class _Meeting:
    """Who is at an address: at most one listener, and the connections that are not closed."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.listener: MemoryListener | None = None
        self.connections: list[MemoryConnection] = []
        self.ids = count(1)

    def introduce(self, connection: "MemoryConnection") -> None:
        """Make a connection a new peer of the listener, if there is one."""
        if self.listener is not None:
            connection.peer = b"peer-%d" % next(self.ids)
            self.listener.welcome(connection)


class MemoryListener:
    """The listener at a name."""

    def __init__(self, meeting: _Meeting, settings: BusSettings) -> None:
        """Take over the connections that are there, with what they have sent."""
        self.address = meeting.address
        self.server_key = b""
        self._max_part_bytes = settings.max_part_bytes
        self._meeting = meeting
        self._peers: dict[bytes, MemoryConnection] = {}
        self._ready: deque[MemoryConnection] = deque()  # each at most once
        self._readable = asyncio.Event()
        self._limiter = AdmissionLimiter()
        self._closed = False
        meeting.listener = self
        for connection in meeting.connections:
            meeting.introduce(connection)

    async def receive(self) -> tuple[bytes, list[bytes]]:
        """Return the next message and its peer; busy peers take turns."""
        await self._limiter.next()
        while not self._ready:
            self._check_open()
            self._readable.clear()
            await self._readable.wait()
        self._check_open()
        connection = self._ready.popleft()
        parts = connection.outgoing.popleft()
        if connection.outgoing:
            self._ready.append(connection)
        return connection.peer, parts

    def send(self, peer: bytes, parts: Parts) -> Outcome:
        """Send to one peer, without waiting."""
        self._check_open()
        check_message(parts, self._max_part_bytes)
        connection = self._peers.get(peer)
        if connection is None:
            return Outcome.GONE
        return Outcome.SENT if connection.deliver(list(parts)) else Outcome.FULL

    def identity(self, peer: bytes) -> Identity:
        """Return who a peer is, as far as the transport has proved it."""
        del peer
        return ANONYMOUS

    def admit(self, peer: bytes) -> None:
        """Learn that a peer has introduced itself."""

    def disconnect(self, peer: bytes) -> None:
        """Cut a peer off; it is another peer from then on."""
        connection = self._peers.pop(peer, None)
        if connection is not None:
            connection.outgoing.clear()
            with contextlib.suppress(ValueError):
                self._ready.remove(connection)
            self._meeting.introduce(connection)

    def is_reachable(self) -> bool:
        """Tell whether new connections can find it: as long as it is open."""
        return self._meeting.listener is self

    def usage(self) -> Usage:
        """Return nothing: there are no bounds but the high-water mark."""
        return Usage()

    async def close(self) -> None:
        """Close; what was not received waits for the next listener."""
        if not self._closed:
            self._closed = True
            self._meeting.listener = None
            self._readable.set()

    def welcome(self, connection: "MemoryConnection") -> None:
        """Take a new peer."""
        self._peers[connection.peer] = connection
        if connection.outgoing:
            self.notice(connection)

    def notice(self, connection: "MemoryConnection") -> None:
        """Learn that a connection that had sent nothing now has."""
        self._ready.append(connection)
        self._readable.set()

    def forget(self, connection: "MemoryConnection") -> None:
        """Learn that a connection was closed; what it has sent is still received."""
        self._peers.pop(connection.peer, None)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"listener at {self.address}")


class MemoryConnection:
    """A connection to a name."""

    def __init__(self, meeting: _Meeting, settings: BusSettings) -> None:
        """Become a peer of the listener, if there is one."""
        self.peer = b""
        self.outgoing: deque[list[bytes]] = deque()  # read by the listener; bounded in `send`
        self._incoming: deque[list[bytes]] = deque()  # bounded in `deliver`
        self._high_water_mark = settings.high_water_mark
        self._max_part_bytes = settings.max_part_bytes
        self._meeting = meeting
        self._readable = asyncio.Event()
        self._limiter = AdmissionLimiter()
        self._closed = False
        meeting.connections.append(self)
        meeting.introduce(self)

    async def receive(self) -> list[bytes]:
        """Return the next message."""
        await self._limiter.next()
        while not self._incoming:
            self._check_open()
            self._readable.clear()
            await self._readable.wait()
        self._check_open()
        return self._incoming.popleft()

    def send(self, parts: Parts) -> bool:
        """Send, without waiting; False if as much as may wait does."""
        self._check_open()
        check_message(parts, self._max_part_bytes)
        if len(self.outgoing) >= self._high_water_mark:
            return False
        self.outgoing.append(list(parts))
        if len(self.outgoing) == 1 and self._meeting.listener is not None:
            self._meeting.listener.notice(self)
        return True

    async def close(self) -> None:
        """Close; a listener that is there still receives what was sent."""
        if not self._closed:
            self._closed = True
            self._meeting.connections.remove(self)
            if self._meeting.listener is not None:
                self._meeting.listener.forget(self)
            self._readable.set()

    def deliver(self, parts: list[bytes]) -> bool:
        """Take a message from the listener; False if as much as may wait does."""
        if len(self._incoming) >= self._high_water_mark:
            return False
        self._incoming.append(parts)
        self._readable.set()
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"connection to {self._meeting.address}")
