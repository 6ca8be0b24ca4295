"""The interface of a transport: messages of several parts between one listener and many connections.

A message arrives whole or not at all, at most once, and those of one connection in the order in which they were sent.
What is sent while a connection is broken may be lost, and so may the last messages of a peer that leaves while more
than the high-water mark is unread: the protocols above ask for them again.
Only `receive`, `listen`, `connect` and `close` wait. All of a transport is used on one event loop.
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
LARGE = 4096
"""Above so many bytes a message is large."""
_REFUSED_BYTES_A_SECOND = 8_388_608
"""Of large messages that were refused; reading them takes less than a tenth of the time."""


class Role(str, Enum):
    """A right that a key can have."""

    __str__ = str.__str__

    WORKER = "worker"
    """Publish streams, under the worker ids that it may use."""
    CLIENT = "client"
    """Send requests, under the client names that it may use."""
    OBSERVER = "observer"
    """Watch workers' streams."""
    OPERATOR = "operator"
    """Pause workers' engines, change their weights, and all else that operators ask of them."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A peer's key as the allow-list has it: its name, its roles, and the worker ids or client names it may use."""

    name: str
    roles: frozenset[Role]
    names: tuple[str, ...] = field(default=("*",))
    """Patterns as in a shell: `worker-*`."""
    key: str = ""
    """The public key that it proved; empty: none."""

    def may(self, role: Role, name: str | None = None) -> bool:
        """Tell whether it has a role, and may use a name in it."""
        return role in self.roles and (name is None or any(fnmatchcase(name, pattern) for pattern in self.names))


ANONYMOUS = Identity("", frozenset(Role))
"""A peer that proves no key: on loopback, in a folder of ours, or in this process. It has every role and name."""


class Outcome(Enum):
    """The result of sending to one peer."""

    SENT = auto()
    FULL = auto()
    GONE = auto()


@dataclass(frozen=True, slots=True)
class Usage:
    """How much of a transport's bounds is in use."""

    admitted: int = 0
    """Connections whose peers have introduced themselves."""
    unadmitted: int = 0
    pending_bytes: int = 0
    """Bytes that have arrived over tcp and were not read as whole messages, at the last check."""
    cut_off: Mapping[str, int] = field(default_factory=dict)
    """Connections that were cut off, by the bound that they exceeded."""


class Listener(Protocol):
    """The side that connections connect to."""

    address: str
    """The address to connect to; with the port that the system chose, where none was given."""
    budget: "ReceiveBudget"
    """How much is received in a row; its `before_pause` is called before `receive` waits as well."""

    async def receive(self) -> tuple[bytes, list[bytes]]:
        """Return the next message and its peer, an opaque id of one connection; reads busy peers in turn."""

    def send(self, peer: bytes, parts: Parts) -> Outcome:
        """Send to one peer, without waiting. FULL: not sent, try again later. GONE: not sent, the peer has left."""

    def identity(self, peer: bytes) -> Identity:
        """Return the identity that a peer which has sent a message has proved."""

    def is_connected(self, peer: bytes) -> bool:
        """Return whether the connection of a peer which has sent a message is still there."""

    def admit(self, peer: bytes) -> None:
        """Mark a peer as introduced: it is no longer cut off for silence, or to make room for others."""

    def disconnect(self, peer: bytes) -> None:
        """Cut a peer off; it may connect again, as another peer."""

    def is_reachable(self) -> bool:
        """Return whether new connections can reach it."""

    def usage(self) -> Usage:
        """Return how much of the bounds is in use, by all listeners of the transport together."""

    async def close(self) -> None:
        """Close once what was sent is out, or after `linger_ms`; the address is free on return."""


class Connection(Protocol):
    """The side that connects; it reconnects to a listener that comes back, as another peer."""

    async def receive(self) -> list[bytes]:
        """Return the next message."""

    def send(self, parts: Parts) -> bool:
        """Send, without waiting. False: not sent, because the send queue is full; try again later."""

    async def close(self) -> None:
        """Close; what was sent still goes out, for at most `linger_ms`."""


def ignore(reason: str) -> None:
    """Ignore the reason for which a peer was refused."""
    del reason


def ignore_loss() -> None:
    """Ignore that a connection broke."""


class Transport(Protocol):
    """Makes listeners and connections."""

    async def listen(self, address: str, refused: Callable[[str], None] = ignore) -> Listener:
        """Listen at an address; raises AddressError for one that cannot be used.

        `refused` is called with one line for each peer that the transport itself refuses or cuts off.
        """

    async def connect(self, address: str, lost: Callable[[], None] = ignore_loss) -> Connection:
        """Connect to an address, whether a listener is there yet or not; raises AddressError for an invalid one.

        `lost` is called on the event loop each time that the connection breaks which the listener had accepted, as when
        its process dies; not for one that stands still, nor after `close`.
        """


class ReceiveBudget:
    """Lets other coroutines run after so many messages, or bytes, that came in a row, or so long spent on them.

    Without a bound on the time, a worker that sends a backlog again keeps those waiting that connect meanwhile.
    """

    def __init__(self) -> None:
        self.before_pause: Callable[[], None] = lambda: None
        """Called before others run: here, and by a listener whose `receive` is about to wait."""
        self._took = inf
        self._renew()

    def _renew(self) -> None:
        self._left, self._bytes_left, self._seconds_left = _BURST, _BURST_BYTES, _BURST_SECONDS

    async def next(self) -> None:
        """Start a receive; yields to the event loop when the budget is spent."""
        self._seconds_left -= max(0.0, time.monotonic() - self._took)
        if not self._left or self._bytes_left <= 0 or self._seconds_left <= 0:
            self._renew()
            self.before_pause()
            await asyncio.sleep(0)
        self._left -= 1

    def took(self, parts: Parts) -> None:
        """Count a received message; from now on its receiver spends time on it."""
        self._bytes_left -= sum(map(len, parts))
        self._took = time.monotonic()


def check_message(parts: Parts, max_part_bytes: int) -> None:
    """Raise MessageError for a message that no peer accepts: it would cut the connection off."""
    if not parts:
        raise MessageError("at least 1 part", 0)
    for part in parts:
        if len(part) > max_part_bytes:
            raise MessageError(f"at most {max_part_bytes} bytes a part", len(part))


class UnadmittedBudget:
    """Lets large messages be read as long as those before them were not refused; small ones cost too little to count.

    A peer that opens connection after connection would else keep a listener busy with what is refused.
    """

    def __init__(self) -> None:
        self._free_at = 0.0

    def allows(self, size: int, now: float) -> bool:
        """Tell whether a message of so many bytes may be read now; the time is in seconds."""
        return size <= LARGE or now >= self._free_at

    def refused(self, size: int, now: float) -> None:
        """Learn that a message was read and refused: large ones are not read for a while."""
        if size > LARGE:
            self._free_at = max(self._free_at, now) + size / _REFUSED_BYTES_A_SECOND
