"""NatsEnd: what listeners, connections and directories share: a connection to a NATS server, remade when lost."""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable

from tokenbus_services.backports import timeout
from tokenbus_services.bus.errors import ClosedError
from tokenbus_services.bus.nats_conversation import Conversation
from tokenbus_services.bus.nats_server import ServerConnection, ServerError, Servers, end_tasks
from tokenbus_services.bus.nats_subjects import Subjects
from tokenbus_services.bus.transport import ReceiveBudget
from tokenbus_services.logs import logger
from tokenbus_services.settings import BusSettings

_log = logger("bus")


class NatsEnd(ABC):
    """Whatever speaks over NATS: one connection to a server after the other, until it is closed."""

    def __init__(self, what: str, servers: Servers, settings: BusSettings) -> None:
        self.servers = servers
        self.settings = settings
        self.group = servers.endpoint.group
        self.subjects = Subjects(servers.endpoint.name, self.group)
        self.server: ServerConnection | None = None
        self.arrived = asyncio.Event()
        self.budget = ReceiveBudget()
        self._what = what
        self._closing: asyncio.Task[None] | None = None
        self._running = asyncio.create_task(self._run())

    @abstractmethod
    async def _serve(self, server: ServerConnection) -> None:
        """Use a connection until it is lost."""

    def _conversations(self) -> Iterable[Conversation]:
        return ()

    def _say_goodbye(self) -> None:  # noqa: B027 - not all have peers
        """Tell each peer."""

    async def _run(self) -> None:
        while True:
            server = self.server = await self.servers.connect()
            try:
                await self._serve(server)
            except ServerError:
                pass  # it was lost
            except Exception:  # noqa: BLE001 - a defect; the next connection is used as if nothing had been before
                _log.exception("nats connection failed")
            finally:
                self.server = None
                await server.close(0)
            if self._closing is not None:  # asked only now: what was sent before a close at once needs a connection
                return

    async def close(self) -> None:
        """Close; what was sent still goes out, for at most `linger_ms`."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
            self.arrived.set()
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with timeout(self.settings.linger_ms / 1000):
                for conversation in self._conversations():
                    await conversation.sent.wait()
        self._say_goodbye()
        if self.server is not None:
            await self.server.close(self.settings.linger_ms / 1000)
        await end_tasks(self._running)

    def check_open(self) -> None:
        """Raise a ClosedError after `close`."""
        if self._closing is not None:
            raise ClosedError(self._what)

    async def wait(self) -> None:
        """Wait until something arrives; raises ClosedError."""
        self.check_open()
        self.arrived.clear()
        await self.arrived.wait()
        self.check_open()
