"""The transport over NATS core: a listener and its connections meet at subjects, and each connection has its own.

A connection draws a random id and speaks at `tokenbus.NAME.up.ROLES.PEER.ID`; its listener answers at
`tokenbus.NAME.down.PEER.ID`. So the server's permissions say who may speak as which peer, with which roles. A listener
holds its NAME at `tokenbus.NAME.listener`. One whose name is `GROUP.MEMBER` announces itself at
`tokenbus.GROUP.MEMBER.here`, so that those who look for any of its group find it.
"""

import asyncio
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from tokenbus_services.bus.addresses import NatsEndpoint, TcpEndpoint, parse_nats
from tokenbus_services.bus.errors import AddressError, NoServerError
from tokenbus_services.bus.nats_conversation import BrokenConversationError, Conversation
from tokenbus_services.bus.nats_directory import NatsDirectory
from tokenbus_services.bus.nats_end import NatsEnd
from tokenbus_services.bus.nats_frames import VERSION, Frame, Kind, unpacked
from tokenbus_services.bus.nats_login import Login
from tokenbus_services.bus.nats_peers import Peer, PeerBounds
from tokenbus_services.bus.nats_server import ServerConnection, Servers, first_of
from tokenbus_services.bus.transport import (
    Identity,
    Outcome,
    Parts,
    Role,
    Usage,
    check_message,
    ignore,
    ignore_loss,
)
from tokenbus_services.logs import logger
from tokenbus_services.settings import BusSettings

_ANYBODY, _ALL = "-", "all"
"""The name of a peer that has none, and the roles of one that did not choose."""
_ID = re.compile(rb"[0-9a-f]{32}")
_PEER = re.compile(r"(?P<roles>[a-z+]+)\.(?P<name>-|[A-Za-z0-9][A-Za-z0-9_-]{0,63})\.[0-9a-f]{32}")
_MINE, _YOURS = b"mine", b"yours"
_ASK_SECONDS = 0.1
_ANSWER_SECONDS = 0.02
_TWICE = 2
_MOST_ENDED = 4
_log = logger("bus")
_TAKEN = "taken: something listens there already"


class NatsTransport:
    """Listens and connects at `nats://HOST:PORT/NAME` and `tls://HOST:PORT/NAME`."""

    def __init__(self, settings: BusSettings) -> None:
        """Take the bounds, times and credentials from the settings."""
        self._settings = settings
        self._bounds = PeerBounds(settings)
        self._logins: dict[bool, Login] = {}
        """What this process proves, by whether it wants TLS: a file that is away later ends nothing."""
        self._failed: dict[TcpEndpoint, float] = {}

    async def listen(self, address: str, refused: Callable[[str], None] = ignore) -> "NatsListener":
        """Listen under a name; raises AddressError where it is taken, or no server answers."""
        servers = self._servers(self._one(address))
        listener = NatsListener(address, servers, self._settings, self._bounds, refused)
        try:
            await listener.claim()
        except BaseException:
            await listener.close()
            raise
        return listener

    async def connect(
        self, address: str, server_key: bytes | None = None, lost: Callable[[], None] = ignore_loss
    ) -> "NatsConnection":
        """Connect to a name; the key is ignored: what is proved is proved to the server."""
        del server_key
        return NatsConnection(address, self._servers(self._one(address)), self._settings, lost)

    def directory(self, address: str, changed: Callable[[], None]) -> NatsDirectory:
        """Return the listeners that announce themselves in the group of an address, which ends with `.*`."""
        return NatsDirectory(address, self._servers(self.endpoint(address)), self._settings, changed)

    def _servers(self, endpoint: NatsEndpoint) -> Servers:
        login = self._logins.get(endpoint.is_tls)
        if login is None:
            login = self._logins[endpoint.is_tls] = Login(endpoint, self._settings)
        return Servers(endpoint, self._settings, login, self._failed)

    def _one(self, address: str) -> NatsEndpoint:
        endpoint = self.endpoint(address)
        if endpoint.is_group:
            raise AddressError(address, "it names no listener, but any whose name begins so")
        return endpoint

    def endpoint(self, address: str) -> NatsEndpoint:
        """Return an address's endpoint; raises AddressError for one that is not safe enough to be used."""
        endpoint = parse_nats(address)
        is_near = all(server.is_loopback for server in endpoint.servers)
        is_safe = endpoint.is_tls and (self._settings.nats_credentials or self._settings.nats_certificate)
        if not (is_near or is_safe or self._settings.insecure):
            reason = (
                "beyond loopback it needs tls:// and bus.nats_credentials or bus.nats_certificate, "
                "unless bus.insecure is true"
            )
            raise AddressError(address, reason)
        return endpoint


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
        self._denied = ""
        self._decided = asyncio.Event()
        self._is_retired = not self.group
        """Whether it announces itself no more."""
        self._announcing: asyncio.TimerHandle | None = None

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
        prefix = f"{self.base}.up."
        await server.subscribe(f"{self.base}.listener", self._asked)
        await server.subscribe(f"{self.base}.listener.{self._id}", self._take_answer)
        await server.subscribe(f"{prefix}*.*.*", lambda subject, *rest: self._take(subject[len(prefix) :], *rest))
        if self.group:
            await server.subscribe(f"tokenbus.{self.group}.who", self._asked_who)
        is_first = not self._decided.is_set()
        try:
            while not server.lost.is_set():
                if not self._is_mine:
                    self._is_mine = await self._ask(server, is_first=is_first)
                    if server.lost.is_set():
                        return
                    self._denied = server.denied
                    self._decided.set()
                self._announce()
                await first_of(server.lost, seconds=self.settings.heartbeat_interval_ms / 1000)
                self._look_after_peers()
        finally:
            self._is_mine = False
            for peer in tuple(self._peers):
                self._forget(peer)

    async def _ask(self, server: ServerConnection, *, is_first: bool) -> bool:
        """Ask whether another listener has the name.

        One that does not answer may stand still: at the start it is let be. Later it counts as none, since the server
        may not know yet that this listener's own earlier connection is gone; it will answer once it goes on.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self.settings.heartbeat_timeout_ms / 1000
        said_yours = 0
        while loop.time() < end and not server.lost.is_set() and not server.denied:
            self._answer = b""
            self._answered.clear()
            server.publish(f"{self.base}.listener", f"{self.base}.listener.{self._id}", self._id.encode())
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
            self.server.publish(f"{self.base}.listener.{asking.decode()}", "", answer)

    def _take_answer(self, subject: str, answer: bytes, nobody: bool) -> None:  # noqa: FBT001
        del subject
        if not self._answered.is_set():
            self._answer = answer
        if nobody or answer == _MINE:
            self._answered.set()
        if self._is_mine and answer == _MINE:
            self._refused("another listener has this one's name: it was there first, and goes on after standing still")
            self._is_mine = False
            for peer in tuple(self._peers):
                self.disconnect(peer)

    # The group.

    def _asked_who(self, subject: str, payload: bytes, nobody: bool) -> None:  # noqa: FBT001 - as a Receive
        del subject, payload, nobody
        if self._announcing is None:  # one answer for all that ask meanwhile
            self._announcing = asyncio.get_running_loop().call_later(_ANSWER_SECONDS, self._announce)

    def _announce(self) -> None:
        """Say that it is here, and how many peers have introduced themselves."""
        if self._announcing is not None:
            self._announcing.cancel()
            self._announcing = None
        if self._is_mine and not self._is_retired and self.server is not None:
            admitted = sum(peer.is_admitted for peer in self._peers.values())
            self.server.publish(f"{self.base}.here", "", str(admitted).encode())

    def retire(self) -> None:
        """Announce itself no more, and say so."""
        if not self._is_retired and self.server is not None:
            self.server.publish(f"{self.base}.here", "", b"")
        self._is_retired = True

    def is_reachable(self) -> bool:
        """Return whether new connections can reach it: the name is its own, and a server is there."""
        return self._is_mine

    # Messages.

    async def receive(self) -> tuple[bytes, list[bytes]]:
        """Return the next message and its peer; reads busy peers in turn."""
        await self.budget.next()
        while not self._ready:
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
        if known is None or self.server is None:
            return Outcome.GONE
        if self.server.pending_bytes >= self.settings.max_total_pending_bytes:
            return Outcome.FULL
        return Outcome.SENT if known.conversation.send(parts) else Outcome.FULL

    def identity(self, peer: bytes) -> Identity:
        """Return what the server lets a peer speak as: its name, the only one that it may use, and its roles."""
        roles, name, _ = peer.decode().split(".")
        chosen = frozenset(Role) if roles == _ALL else frozenset(role for role in Role if role in roles.split("+"))
        return Identity("", chosen) if name == _ANYBODY else Identity(name, chosen, (name,))

    def admit(self, peer: bytes) -> None:
        """Mark a peer as introduced."""
        if (known := self._peers.get(peer)) is not None:
            self._bounds.admit(known)

    def disconnect(self, peer: bytes) -> None:
        """Drop what a peer has sent, and tell it that this conversation is over."""
        if (known := self._peers.get(peer)) is not None:
            self._forget(peer)
            self._end(peer)
            self._drop(known)

    def usage(self) -> Usage:
        """Return how much of the bounds is in use, by all listeners of the transport together."""
        return self._bounds.usage()

    # Peers.

    def _take(self, subject: str, payload: bytes, nobody: bool) -> None:  # noqa: FBT001
        peer = subject.encode()
        if nobody:
            self._forget(peer)
            return
        if not self._is_mine or _PEER.fullmatch(subject) is None:
            return
        known = self._peers.get(peer)
        try:
            frame = unpacked(payload)
        except ValueError as error:
            self._refused(f"{subject}: {error}")
            return
        if frame.kind is Kind.OPEN:
            self._welcome(peer, frame.data)
        elif frame.kind is Kind.END:
            self._forget(peer)
        elif known is None:
            self._end(peer)
        else:
            self._take_frame(known, frame)

    def _take_frame(self, known: Peer, frame: Frame) -> None:
        conversation = known.conversation
        known.is_heard = True
        had = len(conversation.inbox)
        broken = None
        try:
            conversation.take(frame)
        except BrokenConversationError as error:
            broken = error
        self._bounds.count(known)
        if broken is not None:
            self.cut(known, str(broken), broken.kind)
            return
        if conversation.inbox and not had:
            self._ready.append(known)
            self.arrived.set()
        self._bounds.check(known)

    def _welcome(self, peer: bytes, version: bytes) -> None:
        if version != VERSION:
            self._refused(f"{peer.decode()}: it speaks {version[:64]!r}, and this listener {VERSION!r}")
            return
        if self.server is None:
            return
        server, (_, name, own) = self.server, peer.decode().split(".")
        publish = partial(server.publish, f"{self.base}.down.{name}.{own}", f"{self.base}.up.{peer.decode()}")
        publish(Frame(Kind.WELCOME, 0, 0).packed())
        if peer not in self._peers:
            known = self._peers[peer] = Peer(peer, self.cut, self.settings)
            known.conversation.begin(publish, server.max_payload)
            self._bounds.add(known)

    def _look_after_peers(self) -> None:
        """Ask those that say nothing for a sign of life: the server tells whether they are there."""
        self._bounds.cut_silent()
        for known in tuple(self._peers.values()):
            if not known.is_heard:
                known.conversation.say_read()
            known.is_heard = False

    def cut(self, known: Peer, reason: str, kind: str) -> None:
        """Cut a peer off, and report why; where it exceeded no bound, what came before is still received."""
        self._refused(f"{known.id.decode()}: cut off: {reason}")
        if self._peers.get(known.id) is known:
            self._forget(known.id)
            self._end(known.id)
        if kind:
            self._bounds.cut_off[kind] += 1
            self._drop(known)

    def _drop(self, known: Peer) -> None:
        """Drop what a peer has sent and was not read."""
        known.conversation.drop_unread()
        self._bounds.count(known)
        if known in self._ready:
            self._ready.remove(known)

    def _end(self, peer: bytes) -> None:
        if self.server is not None:
            down = peer.decode().partition(".")[2]
            self.server.publish(f"{self.base}.down.{down}", "", Frame(Kind.END, 0, 0).packed())

    def _forget(self, peer: bytes) -> None:
        """Remove a peer that has left; what it has sent is still received."""
        if (known := self._peers.pop(peer, None)) is not None:
            known.conversation.end()
            self._bounds.count(known)
            self._bounds.remove(known)

    def _conversations(self) -> Iterable[Conversation]:
        return [known.conversation for known in self._peers.values()]

    def _say_goodbye(self) -> None:
        self.retire()
        if self._announcing is not None:
            self._announcing.cancel()
        for peer in tuple(self._peers):
            self._end(peer)


class NatsConnection(NatsEnd):
    """A connection to a name: one conversation after the other, each as another peer."""

    def __init__(self, address: str, servers: Servers, settings: BusSettings, lost: Callable[[], None]) -> None:
        """Begin to connect."""
        super().__init__(f"connection to {address}", servers, settings)
        self._lost = lost
        self._queue: deque[bytes] = deque()  # bounded by the high-water mark
        self._current = Conversation(self._queue, settings)
        self._ended: deque[Conversation] = deque(maxlen=_MOST_ENDED)
        """Those with messages to read, before the current one's."""
        self._roles = settings.nats_roles.replace(",", "+") or _ALL
        self._goodbye: Callable[[], None] = lambda: None

    async def receive(self) -> list[bytes]:
        """Return the next message."""
        await self.budget.next()
        while True:
            while self._ended and not self._ended[0].inbox:
                self._ended.popleft()
            oldest = self._ended[0] if self._ended else self._current
            if oldest.inbox:
                break
            await self.wait()
        self.check_open()
        parts = oldest.read()
        self.budget.took(parts)
        return parts

    def send(self, parts: Parts) -> bool:
        """Send, without waiting; False if the send queue is full."""
        self.check_open()
        return self._current.send(parts)

    async def _serve(self, server: ServerConnection) -> None:
        loop, least, most = (
            asyncio.get_running_loop(),
            self.settings.reconnect_ms / 1000,
            self.settings.reconnect_max_ms / 1000,
        )
        seconds = least
        while not server.lost.is_set():
            began = loop.time()
            if await self._converse(server) and self._closing is None:
                self._lost()
            # A listener that cuts this peer off, again and again, is not to be kept busy by it.
            seconds = least if loop.time() - began > most else min(2 * seconds, most)
            await first_of(server.lost, seconds=seconds)

    async def _stay(
        self, conversation: Conversation, heard: asyncio.Event, broken: asyncio.Event, lost: asyncio.Event
    ) -> None:
        """Wait until a conversation breaks."""
        while not broken.is_set() and not lost.is_set():
            heard.clear()
            await first_of(broken, lost, seconds=self.settings.heartbeat_interval_ms / 1000)
            if not heard.is_set():  # with a full window nothing else would be sent, and a dead listener not noticed
                conversation.say_read()

    async def _converse(self, server: ServerConnection) -> bool:
        """Be a peer, from the first OPEN until the conversation breaks; return whether it was ever accepted."""
        own, name = secrets.token_hex(16), self.settings.nats_name or self.servers.user or _ANYBODY
        up, down = f"{self.base}.up.{self._roles}.{name}.{own}", f"{self.base}.down.{name}.{own}"
        publish = partial(server.publish, up, down)
        conversation = self._current
        welcomed, heard, broken = asyncio.Event(), asyncio.Event(), asyncio.Event()

        def take(subject: str, payload: bytes, nobody: bool) -> None:  # noqa: FBT001 - as a Receive
            del subject
            heard.set()
            if broken.is_set():
                return
            try:
                frame = Frame(Kind.END, 0, 0) if nobody else unpacked(payload)
                if not welcomed.is_set():
                    if frame.kind is Kind.WELCOME:
                        welcomed.set()
                        conversation.begin(publish, server.max_payload)
                elif frame.kind is Kind.END:
                    broken.set()
                elif frame.kind is not Kind.WELCOME:
                    conversation.take(frame)
                    self.arrived.set()
            except (ValueError, BrokenConversationError) as error:
                _log.warning("conversation broken", reason=str(error))
                broken.set()

        subscription = await server.subscribe(down, take)
        self._goodbye = partial(publish, Frame(Kind.END, 0, 0).packed())
        seconds = self.settings.reconnect_ms / 1000
        try:
            while not welcomed.is_set() and not server.lost.is_set():
                publish(Frame(Kind.OPEN, 0, 0, VERSION).packed())
                await first_of(welcomed, server.lost, seconds=seconds)
                seconds = min(2 * seconds, self.settings.reconnect_max_ms / 1000)
            await self._stay(conversation, heard, broken, server.lost)
        finally:
            broken.set()
            self._goodbye()
            conversation.end()
            await server.unsubscribe(subscription)
            if conversation.inbox:
                self._ended.append(conversation)
            self._current = Conversation(self._queue, self.settings)
        return welcomed.is_set()

    def _conversations(self) -> Iterable[Conversation]:
        return [self._current]

    def _say_goodbye(self) -> None:
        self._goodbye()
