"""The interface of a transport, which carries multipart messages between one listener and many connections.

A message arrives whole or not at all, at most once, and in order within its connection. Messages that are sent while a
connection is broken may be lost. If more messages than the high-water mark are unread, the last messages of a leaving
peer may be lost. The protocols on top of a transport resend lost messages. Only `receive`, `listen`, `connect` and
`close` wait. A transport belongs to one event loop.
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
    """The right to publish streams, under the worker ids of the key."""
    CLIENT = "client"
    """The right to send requests, under the client names of the key."""
    OBSERVER = "observer"
    """The right to observe the streams of workers."""
    OPERATOR = "operator"
    """The right to send commands to engines, for example to pause or to change weights."""
    PROMPTS = "prompts"
    """The right to see session prompts and prompt scores in observed streams."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a peer's key: a name, roles, and the worker ids or client names that the peer may use."""

    name: str
    roles: frozenset[Role]
    names: tuple[str, ...] = field(default=("*",))
    """Allowed worker ids or client names, as shell patterns such as `worker-*`."""
    key: str = ""
    """Verified public key of the peer, or empty for a peer without a key."""

    def may(self, role: Role, name: str | None = None) -> bool:
        return role in self.roles and (name is None or any(fnmatchcase(name, pattern) for pattern in self.names))


ANONYMOUS = Identity("", frozenset(Role))
"""Identity with every role and name, for a peer without a key.

Peers without a key connect on loopback, through a private folder, in this process, or with `bus.insecure`.
"""


class Outcome(Enum):
    """Outcome of a send to one peer."""

    SENT = auto()
    FULL = auto()
    GONE = auto()


@dataclass(frozen=True, slots=True)
class Usage:
    """Current usage of a transport's limits."""

    admitted: int = 0
    """Number of connections whose peers have introduced themselves."""
    unadmitted: int = 0
    pending_bytes: int = 0
    """Bytes received over TCP but not yet read as whole messages, at the last check."""
    cut_off: Mapping[str, int] = field(default_factory=dict)
    """Number of connections that were cut off, by the limit that they exceeded."""


class Listener(Protocol):
    """The side of a transport that accepts connections."""

    address: str
    """Address to connect to, including the port that the system chose for port 0."""
    budget: "ReceiveBudget"
    """Limit on messages received without a pause; `receive` calls the budget's `before_pause` before it waits."""

    async def receive(self) -> tuple[bytes, list[bytes]]:
        """Return the opaque id of a peer, and the peer's next message; busy peers take turns."""

    def send(self, peer: bytes, parts: Parts) -> Outcome:
        """Send to one peer without waiting; FULL means try again later, and GONE means that the peer has left."""

    def identity(self, peer: bytes) -> Identity:
        """Return the identity of a peer from which a message was received."""

    def is_connected(self, peer: bytes) -> bool:
        """Return whether the connection on which a message was received still exists."""

    def admit(self, peer: bytes) -> None:
        """Mark a peer as introduced, which protects it from eviction and from the limit on silence."""

    def disconnect(self, peer: bytes) -> None:
        """Disconnect a peer, which may connect again as a new peer."""

    def is_reachable(self) -> bool:
        """Return whether new connections can reach the listener."""

    def usage(self) -> Usage:
        """Return the usage of the limits, summed over all listeners of the transport."""

    async def close(self) -> None:
        """Close the listener once all messages are sent or `linger_ms` is over; afterwards the address is free."""


class Connection(Protocol):
    """The connecting side of a transport; after a restart of the listener, it reconnects as a new peer."""

    async def receive(self) -> list[bytes]:
        """Return the next message."""

    def send(self, parts: Parts) -> bool:
        """Send without waiting; return False if the send queue is full and the caller must try again later."""

    async def close(self) -> None:
        """Close the connection; queued messages are still sent for at most `linger_ms`."""


class Transport(Protocol):
    """Factory of listeners and connections."""

    async def listen(self, address: str, refused: Callable[[str], None] = lambda _: None) -> Listener:
        """Listen at an address; raises AddressError if the address cannot be used.

        `refused` is called with one line for each peer that the transport refuses or cuts off.
        """

    async def connect(self, address: str, lost: Callable[[], None] = lambda: None) -> Connection:
        """Connect to an address, even if nothing listens there yet; raises AddressError for an invalid address.

        `lost` is called on the event loop whenever an accepted connection breaks, for example because the listener's
        process died. If the listener's process hangs or the owner calls `close`, `lost` is not called.
        """


class ReceiveBudget:
    """Lets other coroutines run after a number of messages, bytes or seconds without a pause.

    Without the limit on seconds, no peer could connect while a worker replays a backlog.
    """

    def __init__(self) -> None:
        self.before_pause: Callable[[], None] = lambda: None
        """Callback that runs before other coroutines run."""
        self._received_at = inf
        self._renew()

    def _renew(self) -> None:
        self._left, self._bytes_left, self._seconds_left = _BURST, _BURST_BYTES, _BURST_SECONDS

    async def next(self) -> None:
        """Begin a receive; yield to the event loop first if the budget is used up."""
        self._seconds_left -= max(0.0, time.monotonic() - self._received_at)
        if not self._left or self._bytes_left <= 0 or self._seconds_left <= 0:
            self._renew()
            self.before_pause()
            await asyncio.sleep(0)
        self._left -= 1

    def count(self, parts: Parts) -> None:
        """Count a received message, and start to measure the time that the receiver spends on it."""
        self._bytes_left -= sum(map(len, parts))
        self._received_at = time.monotonic()


def check_message(parts: Parts, max_part_bytes: int) -> None:
    """Raise MessageError for an empty or too large message, because a peer would cut off the connection."""
    if not parts:
        raise MessageError("at least 1 part", 0)
    for part in parts:
        if len(part) > max_part_bytes:
            raise MessageError(f"at most {max_part_bytes} bytes a part", len(part))
