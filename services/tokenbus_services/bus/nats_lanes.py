"""Lanes: a listener's connections to the server, one for each name of peers, so that a flood harms that name alone.

NATS counts what a subscriber has not read by connection, and cuts off a connection for which too much waits. So the
frames of peers with different names arrive over different connections. On each of them the server delivers no more
than it was asked for: a flood beyond that is dropped there, and costs this process nothing.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from tokenbus_services.bus.nats_conversation import Conversation, most_frames
from tokenbus_services.bus.nats_end import NatsEnd
from tokenbus_services.bus.nats_frames import Frame, Kind
from tokenbus_services.bus.nats_hellos import HelloInlet
from tokenbus_services.bus.nats_server import Receive, ServerConnection, Servers
from tokenbus_services.settings import BusSettings

MOST_LANES = 256
"""Names beyond these share lanes."""
_MOST_NAMES = 16
"""How many names share one at most."""
_MOST_WAITING = 64
"""How many peers may wait for their lane to be connected; the others say hello again."""

Cut = Callable[["Peer", str, str], None]
"""Cuts a peer off, for a reason and by a bound."""


def name_of(peer: bytes) -> str:
    """Return the name in a peer's id."""
    return peer.decode().split(".")[1]


class Peer:
    """A peer of a listener, from its hello until it leaves."""

    def __init__(self, peer: bytes, lane: "Lane", server: ServerConnection, cut: Cut, settings: BusSettings) -> None:
        """Take its id, where it is heard, and how its listener cuts it off."""
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
        self._lane = lane

    def begin(self, up: str, down: str, hear: Receive) -> None:
        """Hear its frames at one subject, as many as a window has, and speak at another."""
        self._lane.peers[self.id] = self
        self.down = down
        self._inlet = self.server.subscribe(up, hear, self._most)
        self.publish = partial(self.server.publish, down, up)
        self.say(Kind.WELCOME)
        self.conversation.begin(self.publish, self.server.max_payload)

    def say(self, kind: Kind) -> None:
        """Send it a frame that says no more than its kind."""
        self.publish(Frame(kind, 0, 0).packed())

    def took(self) -> None:
        """Count a frame that kept to the rules: the server may deliver one more for each of them."""
        self._taken += 1
        if 2 * self._taken >= self._most:
            self._taken = 0
            self.server.extend(self._inlet, self._most)

    def leave(self) -> None:
        """Hear nothing more of it: the server drops what it still sends."""
        self._lane.peers.pop(self.id, None)
        self.conversation.end()
        self.server.unsubscribe(self._inlet)


class PeersListener(Protocol):
    """What a lane asks of its listener."""

    def hear_hello(self, subject: str, payload: bytes, nobody: bool) -> None:  # noqa: FBT001 - as a Receive
        """Take what came to a subject of hellos."""

    def welcome(self, peer: bytes) -> None:
        """Begin a conversation with a peer that has said hello."""

    def forget(self, known: Peer) -> None:
        """Remove a peer that has left."""


class Lane(NatsEnd):
    """The connection over which the peers of a name are heard and answered."""

    def __init__(self, servers: Servers, settings: BusSettings, listener: PeersListener) -> None:
        self.peers: dict[bytes, Peer] = {}
        self._waiting: dict[bytes, None] = {}
        """Peers whose hello came before this was connected."""
        self.names: list[str] = []
        """Whose hellos it hears, the latest last; at most _MOST_NAMES."""
        self._hellos: dict[str, HelloInlet] = {}
        self._listener = listener
        self._cut_off: list[str] = []
        """Where those are answered that were heard over the connection that was lost last."""
        super().__init__("lane", servers, settings)

    def add(self, name: str) -> list[str]:
        """Hear the hellos of another name, too, where one without peers can make room; return the names that left."""
        left = []
        if len(self.names) >= _MOST_NAMES:
            used = {peer.name for peer in self.peers.values()}
            left = [each for each in self.names if each not in used][:1]
            if not left:
                return []
            self.names.remove(left[0])
            self._forget_name(left[0])
        self.names.append(name)
        if self.server is not None:
            self._hear_name(self.server, name)
        return left

    def wait_for_server(self, peer: bytes) -> None:
        """Welcome a peer as soon as there is a server to do so over; the peer says hello again in any case."""
        if len(self._waiting) < _MOST_WAITING:
            self._waiting[peer] = None

    async def _serve(self, server: ServerConnection) -> None:
        self._hellos.clear()
        for down in self._cut_off:  # at once: nothing else says so where the lost server stands still
            server.publish(down, "", Frame(Kind.END, 0, 0).packed())
        for name in self.names:
            self._hear_name(server, name)
        waiting, self._waiting = self._waiting, {}
        for peer in waiting:
            self._listener.welcome(peer)
        try:
            await server.lost.wait()
        finally:
            self._cut_off = [known.down for known in self.peers.values()]
            for known in tuple(self.peers.values()):
                self._listener.forget(known)

    def _hear_name(self, server: ServerConnection, name: str) -> None:
        subject = self.subjects.hello(name=name)
        self._hellos[name] = HelloInlet(server, subject, self._listener.hear_hello, is_one_name=True)

    def _forget_name(self, name: str) -> None:
        if (hellos := self._hellos.pop(name, None)) is not None:
            hellos.close()

    def _conversations(self) -> Iterable[Conversation]:
        return [peer.conversation for peer in self.peers.values()]

    def _say_goodbye(self) -> None:
        for peer in self.peers.values():
            peer.say(Kind.END)
