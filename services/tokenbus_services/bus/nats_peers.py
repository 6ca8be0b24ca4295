"""The peers of NATS listeners, and the bounds on them: their number, silence and memory."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tokenbus_services.bus.guard import BOUNDS
from tokenbus_services.bus.nats_conversation import WELCOME, Conversation, most_frames
from tokenbus_services.bus.nats_server import Receive, ServerConnection
from tokenbus_services.bus.nats_subjects import ANYBODY
from tokenbus_services.bus.transport import Usage
from tokenbus_services.settings import BusSettings

_FEWEST_UNADMITTED, _SHARE_UNADMITTED = 8, 8
"""Peers of one name that have not introduced themselves: an eighth of all peers, but eight at least."""
_MOST_NAMES, _MOST_SHOWN = 1024, 64
"""Names of which what was dropped is remembered, the latest ones, and those that are shown, with the most."""
Cut = Callable[["Peer", str, str], None]
"""Cuts a peer off, for a reason and by a bound."""


def name_of(peer: bytes) -> str:
    """Return the name in a peer's id."""
    return peer.decode().split(".")[1]


class Peer:
    """A peer of a listener, from its hello until it leaves."""

    def __init__(
        self, peer: bytes, beside: dict[bytes, "Peer"], server: ServerConnection, cut: Cut, settings: BusSettings
    ) -> None:
        self.id = peer
        self.name = name_of(peer)
        self.server = server
        self.cut = cut
        self.conversation = Conversation(deque(), settings)
        self.conversation.most_unread_bytes = settings.max_unadmitted_bytes
        self.began = asyncio.get_running_loop().time()
        self.counted = 0
        """Bytes that are counted for it."""
        self.is_admitted = False
        self.is_heard = True
        self._most = most_frames(server.max_payload, settings)
        self._taken = 0
        self._beside = beside

    def begin(self, up: str, down: str, hear: Receive) -> None:
        """Hear its frames at one subject, as many as a window has, and speak at another."""
        self._beside[self.id] = self
        self.down = down
        self._inlet = self.server.subscribe(up, hear, self._most)
        self.publish = partial(self.server.publish, down, up)
        self.publish(WELCOME)
        self.conversation.begin(self.publish, self.server.max_payload)

    def took(self) -> None:
        """Count a frame that kept to the rules: the server may deliver one more for each of them."""
        self._taken += 1
        if 2 * self._taken >= self._most:
            self._taken = 0
            self.server.extend(self._inlet, self._most)

    def leave(self) -> None:
        """Hear nothing more of it: the server drops what it still sends."""
        self._beside.pop(self.id, None)
        self.conversation.end()
        self.server.unsubscribe(self._inlet)


@dataclass(slots=True)
class _Name:
    """What peers of one name did wrong."""

    dropped: int = 0
    until: float = 0.0
    """Until when no peer of the name is welcomed."""
    seconds: float = 0.0
    """For how long it was not, the last time."""


class PeerBounds:
    """The bounds on the peers of all listeners of a transport: their number, silence and memory."""

    def __init__(self, settings: BusSettings) -> None:
        self.cut_off: Counter[str] = Counter(dict.fromkeys(BOUNDS, 0))
        self._settings = settings
        self._peers: dict[Peer, None] = {}  # the oldest first
        self._left: dict[Peer, None] = {}
        """Those that have left, and have yet to be read."""
        self._names: dict[str, _Name] = {}
        self._unadmitted: Counter[str] = Counter()
        """How many peers of each name have not introduced themselves."""
        self._bytes = {True: 0, False: 0}  # unread, by whether their peer was admitted

    def usage(self) -> Usage:
        """Return how much of the bounds is in use."""
        admitted = sum(peer.is_admitted for peer in self._peers)
        held = sum(self._bytes.values())
        return Usage(admitted, len(self._peers) - admitted, held, dict(self.cut_off), self._dropped())

    def _dropped(self) -> dict[str, int]:
        most = sorted(self._names.items(), key=lambda each: -each[1].dropped)[:_MOST_SHOWN]
        return {name: each.dropped for name, each in most if each.dropped}

    def drop(self, name: str) -> None:
        """Count a frame of a name's that is dropped."""
        self._name(name).dropped += 1

    def _name(self, name: str) -> _Name:
        known = self._names.pop(name, None) or _Name()
        self._names[name] = known  # the latest last
        if len(self._names) > _MOST_NAMES:
            del self._names[next(iter(self._names))]
        return known

    def is_welcome(self, name: str) -> bool:
        """Tell whether another peer of a name may come now."""
        if name == ANYBODY:  # whose peers have nothing to do with each other
            return True
        known = self._names.get(name)
        is_shut = known is not None and asyncio.get_running_loop().time() < known.until
        most = max(_FEWEST_UNADMITTED, self._settings.max_connections // _SHARE_UNADMITTED)
        return not is_shut and self._unadmitted[name] < most

    def shut_out(self, peer: Peer) -> None:
        """Let no peer of a name come for a while after one of them broke the rules, longer each time."""
        if peer.name == ANYBODY:
            return
        known, now = self._name(peer.name), asyncio.get_running_loop().time()
        is_again = now < known.until + known.seconds
        most = self._settings.introduction_timeout_ms / 1000
        known.seconds = min(2 * known.seconds, most) if is_again else self._settings.reconnect_ms / 1000
        known.until = now + known.seconds

    def add(self, peer: Peer) -> None:
        """Count a new peer; of those that have not introduced themselves, one of the name with the most makes room."""
        self._peers[peer] = None
        self._unadmitted[peer.name] += 1
        if len(self._peers) > (most := self._settings.max_connections):
            crowd = max(self._unadmitted, key=self._unadmitted.__getitem__)
            oldest = next(each for each in self._peers if not each.is_admitted and each.name == crowd)
            oldest.cut(oldest, f"at most {most} connections at once, and it has not introduced itself", "connections")

    def remove(self, peer: Peer) -> None:
        """Stop counting a peer; what it has sent still counts until it is read."""
        if peer in self._peers and not peer.is_admitted:
            self._leave_unadmitted(peer)
        self._peers.pop(peer, None)
        if peer.conversation.unread_bytes:
            self._left[peer] = None

    def _leave_unadmitted(self, peer: Peer) -> None:
        self._unadmitted[peer.name] -= 1
        if not self._unadmitted[peer.name]:
            del self._unadmitted[peer.name]

    def admit(self, peer: Peer) -> None:
        """Mark a peer as introduced."""
        if peer in self._peers and not peer.is_admitted:
            self._leave_unadmitted(peer)
        self._bytes[peer.is_admitted] -= peer.counted
        self._bytes[True] += peer.counted
        peer.is_admitted = True
        peer.conversation.most_unread_bytes = self._settings.max_pending_bytes

    def count(self, peer: Peer) -> None:
        """Count what a peer's messages take now."""
        unread = peer.conversation.unread_bytes
        self._bytes[peer.is_admitted] += unread - peer.counted
        peer.counted = unread
        if not unread:
            self._left.pop(peer, None)

    def check(self, peer: Peer) -> None:
        """Cut off those that hold the most, while all hold too much."""
        if not peer.is_admitted:
            self._check_sum([False], self._settings.max_unadmitted_bytes)
        self._check_sum([False, True], self._settings.max_total_pending_bytes)

    def _check_sum(self, kinds: list[bool], most: int) -> None:
        while (held := sum(self._bytes[kind] for kind in kinds)) > most:
            some = [peer for peer in (*self._peers, *self._left) if peer.is_admitted in kinds]
            peer = max(some, key=lambda each: each.conversation.unread_bytes)
            holds = f"it holds {peer.conversation.unread_bytes} of {held} bytes that are unfinished or unread"
            peer.cut(peer, f"{holds}, together more than {most}", "bytes")

    def cut_silent(self) -> None:
        """Cut off those that have not introduced themselves in time, unless they have yet to be read."""
        most = self._settings.introduction_timeout_ms
        now = asyncio.get_running_loop().time()
        for peer in tuple(self._peers):
            if not peer.is_admitted and not peer.conversation.inbox and now - peer.began > most / 1000:
                peer.cut(peer, f"it has not introduced itself within {most} ms", "silent")
