"""PeerBounds: the bounds on the peers of NATS listeners: their number, silence and memory."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable

from tokenbus_services.bus.guard import BOUNDS
from tokenbus_services.bus.nats_conversation import Conversation
from tokenbus_services.bus.transport import Usage
from tokenbus_services.settings import BusSettings

Cut = Callable[["Peer", str, str], None]
"""Cuts a peer off, for a reason and by a bound."""


class Peer:
    """A peer of a listener."""

    def __init__(self, peer: bytes, cut: "Cut", settings: BusSettings) -> None:
        """Take its id, and how its listener cuts it off."""
        self.id = peer
        self.cut = cut
        self.conversation = Conversation(deque(), settings)
        self.conversation.most_unread_bytes = settings.max_unadmitted_bytes
        self.began = asyncio.get_running_loop().time()
        self.counted = 0
        """Bytes that are counted for it."""
        self.is_admitted = False
        self.is_heard = True


class PeerBounds:
    """The bounds on the peers of all listeners of a transport: their number, silence and memory."""

    def __init__(self, settings: BusSettings) -> None:
        """Take the bounds from the settings."""
        self.cut_off: Counter[str] = Counter(dict.fromkeys(BOUNDS, 0))
        self._settings = settings
        self._peers: dict[Peer, None] = {}  # the oldest first
        self._left: dict[Peer, None] = {}
        """Those that have left, and have yet to be read."""
        self._bytes = {True: 0, False: 0}  # unread, by whether their peer was admitted
        self._peak_bytes = 0

    def usage(self) -> Usage:
        """Return how much of the bounds is in use."""
        admitted = sum(peer.is_admitted for peer in self._peers)
        held = sum(self._bytes.values())
        return Usage(admitted, len(self._peers) - admitted, held, self._peak_bytes, dict(self.cut_off))

    def add(self, peer: Peer) -> None:
        """Count a new peer; the oldest of those that have not introduced themselves make room for it."""
        self._peers[peer] = None
        unadmitted = [each for each in self._peers if not each.is_admitted]
        most = self._settings.max_unadmitted_connections
        if len(unadmitted) > most:
            reason = f"at most {most} connections that have not introduced themselves at once"
            unadmitted[0].cut(unadmitted[0], reason, "unadmitted")
        elif len(self._peers) > (most := self._settings.max_connections):
            unadmitted[0].cut(unadmitted[0], f"at most {most} connections at once", "connections")

    def remove(self, peer: Peer) -> None:
        """Stop counting a peer; what it has sent still counts until it is read."""
        self._peers.pop(peer, None)
        if peer.conversation.unread_bytes:
            self._left[peer] = None

    def admit(self, peer: Peer) -> None:
        """Mark a peer as introduced."""
        self._bytes[peer.is_admitted] -= peer.counted
        self._bytes[True] += peer.counted
        peer.is_admitted = True
        peer.conversation.most_unread_bytes = self._settings.max_pending_bytes

    def count(self, peer: Peer) -> None:
        """Count what a peer's messages take now."""
        unread = peer.conversation.unread_bytes
        self._bytes[peer.is_admitted] += unread - peer.counted
        peer.counted = unread
        self._peak_bytes = max(self._peak_bytes, sum(self._bytes.values()))
        if not unread:
            self._left.pop(peer, None)

    def check(self, peer: Peer) -> None:
        """Cut off those that hold the most, while all hold too much."""
        if not peer.is_admitted:
            self._check_sum([False], "max_unadmitted_bytes")
        self._check_sum([False, True], "max_total_pending_bytes")

    def _check_sum(self, kinds: list[bool], name: str) -> None:
        most = getattr(self._settings, name)
        while (held := sum(self._bytes[kind] for kind in kinds)) > most:
            some = [peer for peer in (*self._peers, *self._left) if peer.is_admitted in kinds]
            peer = max(some, key=lambda each: each.conversation.unread_bytes)
            holds = f"it holds {peer.conversation.unread_bytes} of {held} bytes that are unfinished or unread"
            peer.cut(peer, f"{holds}, more than bus.{name}, {most}", "bytes")

    def cut_silent(self) -> None:
        """Cut off those that have not introduced themselves in time, unless they have yet to be read."""
        most = self._settings.introduction_timeout_ms
        now = asyncio.get_running_loop().time()
        for peer in tuple(self._peers):
            if not peer.is_admitted and not peer.conversation.inbox and now - peer.began > most / 1000:
                peer.cut(peer, f"it has not introduced itself within {most} ms", "silent")
