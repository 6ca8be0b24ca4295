"""NatsDirectory: the listeners of a group that announce themselves."""

import asyncio
import re
from collections.abc import Callable

from tokenbus_services.bus.nats_end import NatsEnd
from tokenbus_services.bus.nats_server import ServerConnection, Servers, first_of
from tokenbus_services.bus.nats_subjects import member_in
from tokenbus_services.logs import DeduplicatedLog, logger
from tokenbus_services.settings import BusSettings

_MOST_LISTENERS = 64
_TIMEOUTS = 2
"""After how many heartbeat timeouts a silent listener is forgotten."""
_COUNT = re.compile(rb"[0-9]{1,9}")
_log = logger("bus")


class NatsDirectory(NatsEnd):
    """The listeners of a group: each is known from its first announcement until it says that it leaves, or is silent.

    Silence counts only while there is a server to hear it from.
    """

    def __init__(self, address: str, servers: Servers, settings: BusSettings, changed: Callable[[], None]) -> None:
        """Begin to look; `changed` is called each time that a listener comes or goes, or has other peers."""
        self.listeners: dict[str, int] = {}
        """How many peers each has, by its address."""
        self._prefix = address.removesuffix("*")
        self._heard: dict[str, float] = {}
        self._changed = changed
        self._timeout = _TIMEOUTS * settings.heartbeat_timeout_ms / 1000
        self._repeated_log = DeduplicatedLog()
        super().__init__(f"directory of {address}", servers, settings)

    async def _serve(self, server: ServerConnection) -> None:
        loop, interval = asyncio.get_running_loop(), self.settings.heartbeat_interval_ms / 1000
        self._heard = dict.fromkeys(self._heard, loop.time())
        server.subscribe(self.subjects.any_here, self._take)
        server.publish(self.subjects.who, "", b"")
        while not server.lost.is_set():
            looked = loop.time()
            await first_of(server.lost, seconds=interval)
            stood_still = max(0.0, loop.time() - looked - 2 * interval)
            self._heard = {address: heard + stood_still for address, heard in self._heard.items()}
            for address in [each for each, heard in self._heard.items() if loop.time() - heard > self._timeout]:
                self._forget(address)
            self._repeated_log.expire()

    def _take(self, subject: str, payload: bytes, nobody: bool) -> None:  # noqa: FBT001 - as a Receive
        del nobody
        member = member_in(subject)
        if member is None:
            return
        address = self._prefix + member
        if not payload:
            self._forget(address)
        elif _COUNT.fullmatch(payload) is not None:
            self._hear(address, int(payload))

    def _hear(self, address: str, peers: int) -> None:
        if address not in self._heard and len(self._heard) >= _MOST_LISTENERS:
            most = f"at most {_MOST_LISTENERS}"
            self._repeated_log.begin("most", _log.warning, "too many processors announce themselves", limit=most)
            return
        self._heard[address] = asyncio.get_running_loop().time()
        if self.listeners.get(address) != peers:
            self.listeners[address] = peers
            self._changed()

    def _forget(self, address: str) -> None:
        self._heard.pop(address, None)
        if self.listeners.pop(address, None) is not None:
            self._changed()
