"""NatsConnection: a connection to a listener over NATS: one conversation after the other."""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from tokenbus_services.bus.nats_conversation import BrokenConversationError, Conversation
from tokenbus_services.bus.nats_end import NatsEnd
from tokenbus_services.bus.nats_frames import Frame, Kind, opening, unpacked
from tokenbus_services.bus.nats_server import ServerConnection, Servers, first_of
from tokenbus_services.bus.nats_subjects import ALL_ROLES, ANYBODY
from tokenbus_services.bus.transport import Parts
from tokenbus_services.logs import logger
from tokenbus_services.settings import BusSettings

_OPEN = opening()
_MOST_ENDED = 4
_log = logger("bus")


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
            conversation.beat()
            await first_of(broken, lost, seconds=self.settings.heartbeat_interval_ms / 1000)
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
            except (ValueError, BrokenConversationError) as error:
                _log.warning("conversation broken", reason=str(error))
                broken.set()

        inlet = server.subscribe(down, take)
        self._goodbye = partial(publish, Frame(Kind.END, 0, 0).packed())
        seconds = self.settings.reconnect_ms / 1000
        try:
            while not welcomed.is_set() and not server.lost.is_set():
                # Without a reply: what the server says of a flooded subject would end the conversation.
                server.publish(self.subjects.hello(self._roles, name), "", opening(own))
                server.publish(up, "", _OPEN)  # to an older listener
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
