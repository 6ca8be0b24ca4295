"""Lanes: a listener's connections to the server, one for each name of peers, so that a flood harms that name alone.

NATS counts what a subscriber has not read by connection, and cuts off a connection for which too much waits. So the
frames of peers with different names arrive over different connections. On each of them the server delivers no more
than it was asked for: a flood beyond that is dropped there, and costs this process nothing.
"""

import asyncio
from collections.abc import Callable, Iterable

from tokenbus_services.bus.nats_conversation import END, Conversation
from tokenbus_services.bus.nats_end import NatsEnd
from tokenbus_services.bus.nats_peers import Peer
from tokenbus_services.bus.nats_server import Inlet, Receive, ServerConnection, Servers
from tokenbus_services.settings import BusSettings

MOST_LANES = 256
"""Names beyond these share lanes."""
_MOST_NAMES = 16
"""How many names share one at most."""
_MOST_WAITING = 64
"""How many peers may wait for their lane to be connected; the others say hello again."""
_MOST_HELLOS, _MOST_BYTES = 64, 4_194_304
"""How many hellos the server may deliver at once, and how many bytes, however large they are."""
_FEWEST_HELLOS = 4
_HELLOS_PER_SECOND, _BYTES_PER_SECOND = 2048, 33_554_432
_LONGEST_PAUSE = 1.0


class HelloInlet:
    """A subscription to hellos that ends at the server after a few of them, and is made again after a pause."""

    def __init__(
        self,
        server: ServerConnection,
        subject: str,
        receive: Receive,
        *,
        per_second: int = _HELLOS_PER_SECOND,
        is_one_name: bool = False,
    ) -> None:
        """Subscribe, to so many a second; of one name, fewer and fewer as long as its peers send too many."""
        self._server = server
        self._subject = subject
        self._receive = receive
        self._is_one_name = is_one_name
        self._most = max(_FEWEST_HELLOS, min(_MOST_HELLOS, _MOST_BYTES // server.max_payload))
        self._shortest = self._pause = self._most / per_second
        self._is_closed = False
        self._inlet: Inlet
        self._open()

    def close(self) -> None:
        """Hear no more."""
        self._is_closed = True
        self._server.unsubscribe(self._inlet)

    def _open(self) -> None:
        if self._is_closed:
            return
        self._began, self._bytes = asyncio.get_running_loop().time(), 0
        self._inlet = self._server.subscribe(self._subject, self._take, most=self._most)

    def _take(self, subject: str, payload: bytes, nobody: bool) -> None:  # noqa: FBT001 - as a Receive
        self._bytes += len(payload)
        if self._inlet.received == self._most:
            self._open_later()
        self._receive(subject, payload, nobody)

    def _open_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._server.unsubscribe(self._inlet)
        lasted = loop.time() - self._began
        is_flood = self._is_one_name and lasted < 2 * self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE) if is_flood else self._shortest
        loop.call_later(max(0.0, self._pause - lasted, self._bytes / _BYTES_PER_SECOND - lasted), self._open)


class Lane(NatsEnd):
    """The connection over which the peers of a name are heard and answered."""

    def __init__(
        self,
        servers: Servers,
        settings: BusSettings,
        *,
        hear_hello: Receive,
        welcome: Callable[[bytes], None],
        forget: Callable[[Peer], None],
    ) -> None:
        self.peers: dict[bytes, Peer] = {}
        self._waiting: dict[bytes, None] = {}
        """Peers whose hello came before this was connected."""
        self.names: list[str] = []
        """Whose hellos it hears, the latest last; at most _MOST_NAMES."""
        self._hellos: dict[str, HelloInlet] = {}
        self._hear_hello, self._welcome, self._forget = hear_hello, welcome, forget
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
            if (hellos := self._hellos.pop(left[0], None)) is not None:
                hellos.close()
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
            server.publish(down, "", END)
        for name in self.names:
            self._hear_name(server, name)
        waiting, self._waiting = self._waiting, {}
        for peer in waiting:
            self._welcome(peer)
        try:
            await server.lost.wait()
        finally:
            self._cut_off = [known.down for known in self.peers.values()]
            for known in tuple(self.peers.values()):
                self._forget(known)

    def _hear_name(self, server: ServerConnection, name: str) -> None:
        subject = self.subjects.hello(name=name)
        self._hellos[name] = HelloInlet(server, subject, self._hear_hello, is_one_name=True)

    def _conversations(self) -> Iterable[Conversation]:
        return [peer.conversation for peer in self.peers.values()]

    def _say_goodbye(self) -> None:
        for peer in self.peers.values():
            peer.publish(END)
