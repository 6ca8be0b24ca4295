"""The interface of a transport: messages of several parts between one listener and many connections.

A message arrives whole or not at all, at most once, and in order within its connection. Messages that are sent while a
connection is broken may be lost, and so may the last messages of a peer that leaves while more than the high-water mark
is unread: the protocols above request them again. Only `receive`, `listen`, `connect` and `close` wait. A transport is
used on one event loop.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from fnmatch import fnmatchcase
from math import inf
from typing import Protocol

from tokenbus.bus.errors import MessageError

Parts = Sequence[bytes]
_BURST = 64
_BURST_BYTES = 262_144
_BURST_SECONDS = 0.002


class Role(str, Enum):
    """A right that a key can have."""

    __str__ = str.__str__

    WORKER = "worker"
    """Publish streams under its worker ids."""
    CLIENT = "client"
    """Send requests under its client names."""
    OBSERVER = "observer"
    """Watch workers' streams."""
    OPERATOR = "operator"
    """Send commands to workers' engines: pause, change weights, and others."""
    PROMPTS = "prompts"
    """See the prompts of sessions, and scores of prompts, in the streams that it watches."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The allow-list's entry for a peer's key: its name, its roles, and its worker ids or client names."""

    name: str
    roles: frozenset[Role]
    names: tuple[str, ...] = field(default=("*",))
    """Patterns as in a shell: `worker-*`."""
    key: str = ""
    """The public key that the peer proved; empty: none."""

    def may(self, role: Role, name: str | None = None) -> bool:
        return role in self.roles and (name is None or any(fnmatchcase(name, pattern) for pattern in self.names))


ANONYMOUS = Identity("", frozenset(Role))
"""A peer without a key, on loopback, in a private folder, or in this process: it has every role and name."""


class Outcome(Enum):
    """The outcome of a send to one peer."""

    SENT = auto()
    FULL = auto()
    GONE = auto()


@dataclass(frozen=True, slots=True)
class Usage:
    """How far the bounds of a transport are used."""

    admitted: int = 0
    """Connections whose peers have introduced themselves."""
    unadmitted: int = 0
    pending_bytes: int = 0
    """Bytes over tcp that were not yet read as whole messages, at the last check."""
    cut_off: Mapping[str, int] = field(default_factory=dict)
    """Number of connections that were cut off, by the bound that they exceeded."""


class Listener(Protocol):
    """The side that connections connect to."""

    address: str
    """The address to connect to, with the port that the system chose if none was given."""
    budget: "ReceiveBudget"
    """The bound on messages received in a row; `receive` also calls its `before_pause` before it waits."""

    async def receive(self) -> tuple[bytes, list[bytes]]:
        """Return the next message and its peer (an opaque id of the connection); busy peers are read in turn."""

    def send(self, peer: bytes, parts: Parts) -> Outcome:
        """Send to one peer without waiting. FULL: not sent, try again later. GONE: not sent, the peer has left."""

    def identity(self, peer: bytes) -> Identity:
        """Return the identity that the peer of a received message has proved."""

    def is_connected(self, peer: bytes) -> bool:
        """Return whether the connection on which a message was received still exists."""

    def admit(self, peer: bytes) -> None:
        """Mark a peer as introduced, so that it is not cut off for silence or to make room for others."""

    def disconnect(self, peer: bytes) -> None:
        """Cut a peer off; it may connect again, as a new peer."""

    def is_reachable(self) -> bool:
        """Return whether new connections can reach the listener."""

    def usage(self) -> Usage:
        """Return how far the transport's listeners together use its bounds."""

    async def close(self) -> None:
        """Close when all messages are sent, or after `linger_ms`; the address is free on return."""


class Connection(Protocol):
    """The side that connects; if its listener comes back, it reconnects as a new peer."""

    async def receive(self) -> list[bytes]:
        """Return the next message."""

    def send(self, parts: Parts) -> bool:
        """Send without waiting. False: not sent, because the send queue is full; try again later."""

    async def close(self) -> None:
        """Close; queued messages are still sent, for at most `linger_ms`."""


class Transport(Protocol):
    """Makes listeners and connections."""

    async def listen(self, address: str, refused: Callable[[str], None] = lambda _: None) -> Listener:
        """Listen at an address; raises AddressError for one that cannot be used.

        `refused` is called with one line for each peer that the transport itself refuses or cuts off.
        """

    async def connect(self, address: str, lost: Callable[[], None] = lambda: None) -> Connection:
        """Connect to an address, even if nothing listens there yet; raises AddressError for an invalid address.

        `lost` is called on the event loop whenever an accepted connection breaks, for example because the listener's
        process died; not while that process hangs, and not after `close`.
        """


class ReceiveBudget:
    """Lets other coroutines run after a number of messages, bytes or seconds in a row.

    Without the bound on time, peers could not connect while a worker replays a backlog.
    """

    def __init__(self) -> None:
        self.before_pause: Callable[[], None] = lambda: None
        """Called before other coroutines run."""
        self._received_at = inf
        self._renew()

    def _renew(self) -> None:
        self._left, self._bytes_left, self._seconds_left = _BURST, _BURST_BYTES, _BURST_SECONDS

    async def next(self) -> None:
        """Begin a receive; if the budget is spent, yield to the event loop first."""
        self._seconds_left -= max(0.0, time.monotonic() - self._received_at)
        if not self._left or self._bytes_left <= 0 or self._seconds_left <= 0:
            self._renew()
            self.before_pause()
            await asyncio.sleep(0)
        self._left -= 1

    def count(self, parts: Parts) -> None:
        """Count a received message, and the time that its receiver spends on it from now on."""
        self._bytes_left -= sum(map(len, parts))
        self._received_at = time.monotonic()


def check_message(parts: Parts, max_part_bytes: int) -> None:
    """Raise MessageError for a message for which peers would cut the connection off."""
    if not parts:
        raise MessageError("at least 1 part", 0)
    for part in parts:
        if len(part) > max_part_bytes:
            raise MessageError(f"at most {max_part_bytes} bytes a part", len(part))
