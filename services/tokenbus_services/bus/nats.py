"""The transport over NATS core: a listener and its connections meet at subjects, and each connection has its own.

A connection draws a random id, and says hello with it at `tokenbus.NAME.up.ROLES.PEER.hello`. Then it speaks at
`tokenbus.NAME.up.ROLES.PEER.ID`, and its listener answers at `tokenbus.NAME.down.PEER.ID`. So the server's permissions
say who may speak as which peer, with which roles. A listener holds its NAME at `tokenbus.NAME.listener`. One whose name
is `GROUP.MEMBER` announces itself at `tokenbus.GROUP.MEMBER.here`, so that those who look for any of its group find it.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from tokenbus_services.bus.addresses import NatsEndpoint, TcpEndpoint, parse_nats
from tokenbus_services.bus.errors import AddressError
from tokenbus_services.bus.nats_conversation import END, HELLO, Conversation, Frame, Kind, unpacked
from tokenbus_services.bus.nats_directory import NatsDirectory
from tokenbus_services.bus.nats_end import NatsEnd
from tokenbus_services.bus.nats_listener import NatsListener
from tokenbus_services.bus.nats_login import Login
from tokenbus_services.bus.nats_peers import PeerBounds
from tokenbus_services.bus.nats_server import ServerConnection, Servers, first_of
from tokenbus_services.bus.nats_subjects import ALL_ROLES, ANYBODY
from tokenbus_services.bus.transport import Parts, ignore, ignore_loss
from tokenbus_services.logs import logger
from tokenbus_services.settings import BusSettings

_MOST_ENDED = 4
_log = logger("bus")


class NatsTransport:
    """Listens and connects at `nats://HOST:PORT/NAME` and `tls://HOST:PORT/NAME`."""

    def __init__(self, settings: BusSettings) -> None:
        self._settings = settings
        self._bounds = PeerBounds(settings)
        self._logins: dict[bool, Login] = {}
        """What this process proves, by whether it wants TLS: a file that is away later ends nothing."""
        self._failed: dict[TcpEndpoint, float] = {}

    async def listen(self, address: str, refused: Callable[[str], None] = ignore) -> NatsListener:
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


class NatsConnection(NatsEnd):
    """A connection to a name: one conversation after the other, each as another peer."""

    def __init__(self, address: str, servers: Servers, settings: BusSettings, lost: Callable[[], None]) -> None:
        super().__init__(f"connection to {address}", servers, settings)
        self._lost = lost
        self._queue: deque[bytes] = deque()  # bounded by the high-water mark
        self._current = Conversation(self._queue, settings)
        self._ended: deque[Conversation] = deque(maxlen=_MOST_ENDED)
        """Those with messages to read, before the current one's."""
        self._roles = settings.nats_roles.replace(",", "+") or ALL_ROLES
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
        loop = asyncio.get_running_loop()
        least, most = self.settings.reconnect_ms / 1000, self.settings.reconnect_max_ms / 1000
        seconds = least
        while not server.lost.is_set():
            began = loop.time()
            if await self._converse(server) and self._closing is None:
                self._lost()
            # A listener that cuts this peer off, again and again, is not to be kept busy by it.
            seconds = least if loop.time() - began > most else min(2 * seconds, most)
            await first_of(server.lost, seconds=seconds)

    async def _stay(self, conversation: Conversation, heard: asyncio.Event, *ends: asyncio.Event) -> None:
        """Wait until a conversation breaks, or the server is lost."""
        while not any(end.is_set() for end in ends):
            heard.clear()
            conversation.beat()
            await first_of(*ends, seconds=self.settings.heartbeat_interval_ms / 1000)
            if not heard.is_set():  # with a full window nothing else would be sent, and a dead listener not noticed
                conversation.say_read()

    async def _converse(self, server: ServerConnection) -> bool:
        """Be a peer, from the first OPEN until the conversation breaks; return whether it was ever accepted."""
        own = secrets.token_hex(16)
        name = self.settings.nats_name or self.servers.user or ANYBODY
        peer = f"{self._roles}.{name}.{own}"
        up, down = self.subjects.up(peer), self.subjects.down(peer)
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
            except ValueError as error:
                _log.warning("conversation broken", reason=str(error))
                broken.set()

        inlet = server.subscribe(down, take)
        self._goodbye = partial(publish, END)
        seconds = self.settings.reconnect_ms / 1000
        try:
            while not welcomed.is_set() and not server.lost.is_set():
                # Without a reply: what the server says of a flooded subject would end the conversation.
                server.publish(self.subjects.hello(self._roles, name), "", HELLO + own.encode())
                await first_of(welcomed, server.lost, seconds=seconds)
                seconds = min(2 * seconds, self.settings.reconnect_max_ms / 1000)
            await self._stay(conversation, heard, broken, server.lost)
        finally:
            broken.set()
            self._goodbye()
            conversation.end()
            server.unsubscribe(inlet)
            if conversation.inbox:
                self._ended.append(conversation)
            self._current = Conversation(self._queue, self.settings)
        return welcomed.is_set()

    def _conversations(self) -> Iterable[Conversation]:
        return [self._current]

    def _say_goodbye(self) -> None:
        self._goodbye()
