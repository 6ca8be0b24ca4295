"""What a transport is: messages of several parts between one listener and many connections.

A message arrives whole or not at all, at most once, and those of one connection in the order in which they were sent.
What was sent while a connection was broken may be lost, and so may the last that a peer sent before it left, if more
than the high-water mark was unread: who needs it all asks for it, as the stream protocol does.
Nothing here waits but `receive`, `listen`, `connect` and `close`. All of a transport is used on one event loop.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from tokenbus_services.bus.errors import MessageError
from tokenbus_services.bus.identity import Identity

Parts = Sequence[bytes]
_BURST = 64
_BURST_BYTES = 262_144


class Outcome(Enum):
    """What became of a message to one peer."""

    SENT = auto()
    FULL = auto()
    GONE = auto()


@dataclass(frozen=True, slots=True)
class Usage:
    """How much of a transport's bounds its peers use."""

    admitted: int = 0
    """Connections that have introduced themselves."""
    unadmitted: int = 0
    """Those that have not."""
    pending_bytes: int = 0
    """What came in over tcp and was not read as whole messages, as far as was looked at last."""
    peak_pending_bytes: int = 0
    cut_off: Mapping[str, int] = field(default_factory=dict)
    """Connections that were cut off, by the bound that they broke."""


class Listener(Protocol):
    """The side that many connect to."""

    address: str
    """Where connections find it; where a port was left open, the one that was chosen."""
    server_key: bytes
    """The public key that connections need to reach it; empty: it asks for no keys."""

    async def receive(self) -> tuple[bytes, list[bytes]]:
        """Return the next message and its peer, an opaque id of one connection; busy peers take turns."""

    def send(self, peer: bytes, parts: Parts) -> Outcome:
        """Send to one peer, without waiting. FULL: nothing was sent, try later. GONE: this peer does not come back."""

    def identity(self, peer: bytes) -> Identity:
        """Return who a peer that has sent a message is, as far as the transport has proved it."""

    def admit(self, peer: bytes) -> None:
        """Learn that a peer has introduced itself: it is not cut off for being silent, or for being one too many."""

    def disconnect(self, peer: bytes) -> None:
        """Cut a peer off. It may connect again, as another peer."""

    def is_reachable(self) -> bool:
        """Tell whether new connections can find it."""

    def usage(self) -> Usage:
        """Return how much of its bounds is used, by all listeners of its transport together."""

    async def close(self) -> None:
        """Close, when what was sent is out or after `linger_ms`; the address is free on return."""


class Connection(Protocol):
    """The side that connects; it finds its listener again after that was away, and is another peer then."""

    async def receive(self) -> list[bytes]:
        """Return the next message."""

    def send(self, parts: Parts) -> bool:
        """Send, without waiting. False: nothing was sent, because too much waits to go out; try later."""

    async def close(self) -> None:
        """Close; what was sent still goes out for `linger_ms`."""


def ignore(reason: str) -> None:
    """Take a reason and do nothing."""
    del reason


class Transport(Protocol):
    """A way to carry messages."""

    async def listen(self, address: str, refused: Callable[[str], None] = ignore) -> Listener:
        """Listen at an address, or raise an AddressError.

        `refused` is called with one line for each peer that the transport itself turned away or cut off.
        """

    async def connect(self, address: str, server_key: bytes | None = None) -> Connection:
        """Connect to an address, whether or not a listener is there yet, or raise an AddressError.

        `server_key` is the listener's own; empty: it has none; None: the one of the settings.
        """


class AdmissionLimiter:
    """Lets other coroutines run after some messages, or some bytes, that were received in a row without waiting."""

    def __init__(self) -> None:
        self._left = _BURST
        self._bytes_left = _BURST_BYTES

    async def next(self) -> None:
        """Begin a receive."""
        if not self._left or self._bytes_left <= 0:
            self._left, self._bytes_left = _BURST, _BURST_BYTES
            await asyncio.sleep(0)
        self._left -= 1

    def took(self, parts: Parts) -> None:
        """Count what was received."""
        self._bytes_left -= sum(map(len, parts))


def check_message(parts: Parts, max_part_bytes: int) -> None:
    """Raise a MessageError if no peer would take a message: a larger part would cut the connection off."""
    if not parts:
        raise MessageError("at least 1 part", 0)
    for part in parts:
        if len(part) > max_part_bytes:
            raise MessageError(f"at most {max_part_bytes} bytes a part", len(part))
