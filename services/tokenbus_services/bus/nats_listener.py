"""NatsListener: a listener over NATS: it holds its name, welcomes peers, and takes what they send."""

import asyncio
import re
import secrets
from collections import deque
from collections.abc import Callable
from functools import partial

from tokenbus_services.bus.errors import AddressError, NoServerError
from tokenbus_services.bus.nats_conversation import END, HELLO, WELCOME, Kind, unpacked
from tokenbus_services.bus.nats_end import NatsEnd
from tokenbus_services.bus.nats_lanes import MOST_LANES, HelloInlet, Lane
from tokenbus_services.bus.nats_peers import Peer, PeerBounds, name_of
from tokenbus_services.bus.nats_server import Inlet, ServerConnection, Servers, first_of
from tokenbus_services.bus.nats_subjects import ALL_ROLES, ANYBODY
from tokenbus_services.bus.transport import Identity, Outcome, Parts, Role, Usage, check_message
from tokenbus_services.settings import BusSettings

_UNKNOWN_PER_SECOND = 256
"""How many frames of unknown peers are heard; few, as those of welcomed peers come to that subject, too."""
_ID_LENGTH = 32
_ID = re.compile(rb"[0-9a-f]{32}")
_PEER = re.compile(r"(?P<roles>[a-z+]+)\.(?P<name>-|[A-Za-z0-9][A-Za-z0-9_-]{0,63})\.[0-9a-f]{32}")
_MINE, _YOURS = b"mine", b"yours"
_ASK_SECONDS = 0.1
_ANSWER_SECONDS = 0.02
_TWICE = 2
_TAKEN = "taken: something listens there already"


class NatsListener(NatsEnd):
    """The listener at a name; a peer's id is `ROLES.PEER.ID`, as in the subject at which it speaks."""

    def __init__(
        self,
        address: str,
        servers: Servers,
        settings: BusSettings,
        bounds: PeerBounds,
        refused: Callable[[str], None],
    ) -> None:
        """Begin to connect; nothing is taken before the name is claimed."""
        super().__init__(f"listener at {address}", servers, settings)
        self.address = address
        self.server_key = b""
        self._id = secrets.token_hex(16)
        self._bounds = bounds
        self._refused = refused
        self._peers: dict[bytes, Peer] = {}
        self._ready: deque[Peer] = deque()  # each at most once
        self._answer = b""
        self._answered = asyncio.Event()
        self._is_mine = False
        self._was_mine = False
        """Whether the name was its own when the last server was lost, and no other listener has claimed it since.

        Meanwhile peers are welcome: while a server of the cluster stands still, asking for the name gets no answer.
        """
        self._denied = ""
        self._decided = asyncio.Event()
        self._is_retired = not self.group
        """Whether it announces itself no more."""
        self._announcing: asyncio.TimerHandle | None = None
        self._asking: Inlet | None = None
        self._lanes: dict[str, Lane] = {}
        """The connection for the peers of each name; at most MOST_LANES, each for a few names."""

    # The name.

    async def claim(self) -> None:
        """Wait until the name is this listener's; raises AddressError where it is another's, or no server answers."""
        seconds = self.settings.heartbeat_timeout_ms / 1000
        await first_of(self._decided, seconds=2 * seconds)
        if not self._decided.is_set():
            raise NoServerError(self.address, f"no server answers within {2 * seconds:g} s: {self.servers.reason}")
        if not self._is_mine:
            raise AddressError(self.address, f"not permitted: {self._denied}" if self._denied else _TAKEN)

    async def _serve(self, server: ServerConnection) -> None:
        server.subscribe(self.subjects.claim, self._asked)
        server.subscribe(self.subjects.answer_to(self._id), self._take_answer)
        HelloInlet(server, self.subjects.hello(), self._hear_hello)
        HelloInlet(server, self.subjects.up("*.*.*"), self._hear_unknown, per_second=_UNKNOWN_PER_SECOND)
        self._asking = None
        is_first = not self._decided.is_set()
        try:
            while not server.lost.is_set():
                if not self._is_mine:
                    self._is_mine = await self._ask(server, is_first=is_first)
                    if server.lost.is_set():
                        return
                    self._denied = server.denied
                    self._decided.set()
                    self._was_mine = self._is_mine
                    if not self._is_mine:
                        self._disconnect_all()
                self._announce()
                await first_of(server.lost, seconds=self.settings.heartbeat_interval_ms / 1000)
                self._look_after_peers()
        finally:
            self._is_mine = False

    async def _ask(self, server: ServerConnection, *, is_first: bool) -> bool:
        """Ask whether another listener has the name.

        The server says so where nothing is subscribed. What is subscribed and does not answer may be a listener that
        stands still: at the start the name then counts as taken. Later it counts as free, since it may be this
        listener's own earlier connection, which the server has not given up yet; another listener answers later.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self.settings.heartbeat_timeout_ms / 1000
        said_yours = 0
        while loop.time() < end and not server.lost.is_set() and not server.denied:
            self._answer = b""
            self._answered.clear()
            server.publish(self.subjects.claim, self.subjects.answer_to(self._id), self._id.encode())
            await first_of(self._answered, server.lost, seconds=_ASK_SECONDS)
            if self._answered.is_set():
                return self._answer != _MINE
            # Another that starts now has the larger id. It may just have learned that it is alone: so ask it twice.
            said_yours += self._answer == _YOURS
            if said_yours == _TWICE:
                return True
        return not is_first and not server.denied

    def _asked(self, subject: str, asking: bytes, nobody: bool) -> None:  # noqa: FBT001 - as a Receive
        del subject, nobody
        if self.server is not None and _ID.fullmatch(asking):
            answer = _MINE if self._is_mine or self._id.encode() < asking else _YOURS
            self.server.publish(self.subjects.answer_to(asking.decode()), "", answer)

    def _take_answer(self, subject: str, answer: bytes, nobody: bool) -> None:  # noqa: FBT001
        del subject
        if not self._answered.is_set():
            self._answer = answer
        if nobody or answer == _MINE:
            self._answered.set()
        if self._is_mine and answer == _MINE:
            self._refused("another listener has this one's name: it was there first, and goes on after standing still")
            self._is_mine = self._was_mine = False
            self._disconnect_all()

    def _disconnect_all(self) -> None:
        for peer in tuple(self._peers):
            self.disconnect(peer)

    # The group.

    def _hear_who(self) -> None:
        """Hear one question: the answer is for all that ask meanwhile, and for the server to drop."""
        if self.group and self.server is not None and (self._asking is None or self._asking.received):
            self._asking = self.server.subscribe(self.subjects.who, self._asked_who, most=1)

    def _asked_who(self, subject: str, payload: bytes, nobody: bool) -> None:  # noqa: FBT001 - as a Receive
        del subject, payload, nobody
        if self._announcing is None:
            self._announcing = asyncio.get_running_loop().call_later(_ANSWER_SECONDS, self._announce)

    def _announce(self) -> None:
        if self._announcing is not None:
            self._announcing.cancel()
            self._announcing = None
        self._hear_who()
        if self.is_reachable() and not self._is_retired and self.server is not None:
            admitted = sum(peer.is_admitted for peer in self._peers.values())
            self.server.publish(self.subjects.here, "", str(admitted).encode())

    def retire(self) -> None:
        """Announce itself no more, and say so."""
        if not self._is_retired and self.server is not None:
            self.server.publish(self.subjects.here, "", b"")
        self._is_retired = True

    def is_reachable(self) -> bool:
        """Return whether new connections can reach it: the name is its own, and a server is there."""
        return self._is_mine or (self._was_mine and self.server is not None)

    # Messages.

    async def receive(self) -> tuple[bytes, list[bytes]]:
        """Return the next message and its peer; reads busy peers in turn."""
        await self.budget.next()
        while not self._ready:
            self.budget.before_pause()
            await self.wait()
        self.check_open()
        peer = self._ready.popleft()
        parts = peer.conversation.read()
        self._bounds.count(peer)
        if peer.conversation.inbox:
            self._ready.append(peer)
        self.budget.took(parts)
        return peer.id, parts

    def send(self, peer: bytes, parts: Parts) -> Outcome:
        """Send to one peer, without waiting."""
        self.check_open()
        check_message(parts, self.settings.max_part_bytes)
        known = self._peers.get(peer)
        if known is None or known.server.lost.is_set():
            return Outcome.GONE
        if known.server.pending_bytes >= self.settings.max_total_pending_bytes:
            return Outcome.FULL
        return Outcome.SENT if known.conversation.send(parts) else Outcome.FULL

    def identity(self, peer: bytes) -> Identity:
        """Return what the server lets a peer speak as: its name, the only one that it may use, and its roles."""
        roles, name, _ = peer.decode().split(".")
        chosen = frozenset(Role) if roles == ALL_ROLES else frozenset(role for role in Role if role in roles.split("+"))
        return Identity("", chosen) if name == ANYBODY else Identity(name, chosen, (name,))

    def admit(self, peer: bytes) -> None:
        """Mark a peer as introduced."""
        if (known := self._peers.get(peer)) is not None:
            self._bounds.admit(known)

    def disconnect(self, peer: bytes) -> None:
        """Drop what a peer has sent, and tell it that this conversation is over."""
        if (known := self._peers.get(peer)) is not None:
            self.forget(known)
            known.publish(END)
            self._drop(known)

    def usage(self) -> Usage:
        """Return how much of the bounds is in use, by all listeners of the transport together."""
        return self._bounds.usage()

    # Peers.

    def _hear_hello(self, subject: str, payload: bytes, nobody: bool) -> None:  # noqa: FBT001 - as a Receive
        del nobody
        place, hello = self.subjects.peer_in(subject), payload[:-_ID_LENGTH]
        peer = place + payload[-_ID_LENGTH:].decode("ascii", "replace")
        is_peer = self.is_reachable() and _PEER.fullmatch(peer) is not None
        if is_peer and hello == HELLO:
            self.welcome(peer.encode())
            return
        self._bounds.drop(name_of(place.encode()))
        if is_peer:
            self._refused(f"{peer}: its hello is {hello[:64]!r}, and this listener's {HELLO!r}")

    def _hear_unknown(self, subject: str, payload: bytes, nobody: bool) -> None:  # noqa: FBT001 - as a Receive
        """End the conversation of a peer that this listener does not know, as one of a listener that died."""
        peer = self.subjects.peer_in(subject)
        is_unknown = not nobody and peer.encode() not in self._peers and _PEER.fullmatch(peer) is not None
        if is_unknown and self.is_reachable() and self.server is not None and payload[:1] != END[:1]:
            self._bounds.drop(name_of(peer.encode()))
            self.server.publish(self.subjects.down(peer), "", END)

    def welcome(self, peer: bytes) -> None:
        """Begin a conversation with a peer that has said hello, as soon as its lane is connected."""
        known = self._peers.get(peer)
        if known is not None:
            known.publish(WELCOME)
            return
        name = name_of(peer)
        if not self._bounds.is_welcome(name):
            self._bounds.drop(name)
            return
        lane = self._lane(name)
        if lane is None:
            self._bounds.drop(name)
        elif lane.server is None:
            lane.wait_for_server(peer)
        else:
            known = self._peers[peer] = Peer(peer, lane.peers, lane.server, self.cut, self.settings)
            known.begin(self.subjects.up(peer.decode()), self.subjects.down(peer.decode()), partial(self._take, known))
            self._bounds.add(known)

    def _lane(self, name: str) -> Lane | None:
        """Return the connection for the peers of a name; None: there are too many names."""
        lane = self._lanes.get(name)
        if lane is None:
            distinct = dict.fromkeys(self._lanes.values())
            if len(distinct) < MOST_LANES:
                lane = Lane(
                    self.servers.again(),
                    self.settings,
                    hear_hello=self._hear_hello,
                    welcome=self.welcome,
                    forget=self.forget,
                )
            else:
                lane = min(distinct, key=lambda each: (len(each.peers), len(each.names)))
            for left in lane.add(name):
                del self._lanes[left]
            if name in lane.names:
                self._lanes[name] = lane
        return self._lanes.get(name)

    def _take(self, known: Peer, subject: str, payload: bytes, nobody: bool) -> None:  # noqa: FBT001
        del subject
        if self._peers.get(known.id) is not known:
            return
        if nobody:
            if not known.is_admitted:  # it has said hello, and does not hear the answer
                self._bounds.drop(known.name)
                self._bounds.shut_out(known)
            self.forget(known)
            return
        known.is_heard = True
        had = len(known.conversation.inbox)
        try:
            frame = unpacked(payload)
            if frame.kind is Kind.END:
                self.forget(known)
                return
            known.conversation.take(frame)
        except ValueError as error:
            self._bounds.count(known)
            self._bounds.drop(known.name)
            self.cut(known, str(error), getattr(error, "kind", ""))
            return
        self._bounds.count(known)
        known.took()
        if known.conversation.inbox and not had:
            self._ready.append(known)
            self.arrived.set()
        self._bounds.check(known)

    def _look_after_peers(self) -> None:
        """Ask those that say nothing for a sign of life: the server tells whether they are there."""
        self._bounds.cut_silent()
        for known in tuple(self._peers.values()):
            known.conversation.beat()
            if not known.is_heard:
                known.conversation.say_read()
            known.is_heard = False

    def cut(self, known: Peer, reason: str, kind: str) -> None:
        """Cut a peer off, and report why; where it exceeded no bound, what came before is still received."""
        self._refused(f"{known.id.decode()}: cut off: {reason}")
        if self._peers.get(known.id) is known:
            self.forget(known)
            known.publish(END)
        if kind in ("", "bytes"):
            self._bounds.shut_out(known)
        if kind:
            self._bounds.cut_off[kind] += 1
            self._drop(known)

    def _drop(self, known: Peer) -> None:
        known.conversation.drop_unread()
        self._bounds.count(known)
        if known in self._ready:
            self._ready.remove(known)

    def forget(self, known: Peer) -> None:
        """Remove a peer that has left; what it has sent is still received."""
        if self._peers.get(known.id) is known:
            del self._peers[known.id]
            known.leave()
            self._bounds.count(known)
            self._bounds.remove(known)

    def _say_goodbye(self) -> None:
        self.retire()
        if self._announcing is not None:
            self._announcing.cancel()

    async def close(self) -> None:
        """Close; what was sent to peers still goes out, for at most `linger_ms`."""
        self._is_mine = self._was_mine = False
        await asyncio.gather(super().close(), *(lane.close() for lane in dict.fromkeys(self._lanes.values())))
