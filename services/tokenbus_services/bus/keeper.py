"""What keeps a ZeroMQ connection trying.

libzmq connects again after a broken connection, but never again after one on which it heard what it does not
understand, or a part that is too large: a worker that once reached the wrong server would be mute until its restart.
"""

import asyncio
import contextlib

import zmq
from zmq.utils.monitor import parse_monitor_message

from tokenbus_services.bus.errors import ClosedError
from tokenbus_services.bus.sockets import LoopSocket
from tokenbus_services.logs import DeduplicatedLog, logger
from tokenbus_services.settings import BusSettings

_ALIVE = zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_RETRIED
_FAILURES = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the listener does not allow this process's key (bus.key_file)",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the listener asks for a key and this process shows none, or the reverse",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the listener ended it; its key may be another than bus.server_key",
}
_EVENTS = _ALIVE | zmq.EVENT_DISCONNECTED | sum(_FAILURES)
_log = logger("bus")


class Keeper:
    """Connects a socket again when libzmq has given it up."""

    def __init__(
        self, watched: "zmq.Socket[bytes]", connection: LoopSocket, address: str, settings: BusSettings
    ) -> None:
        """Watch a socket, before it connects."""
        self._watched = watched
        self._connection = connection
        self._address = address
        self._seconds = settings.reconnect_max_ms / 1000
        self._socket = LoopSocket(watched.get_monitor_socket(_EVENTS), "keeper")
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._repeated_log = DeduplicatedLog()
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Let it rest."""
        if self._timer is not None:
            self._timer.cancel()
        self._watched.disable_monitor()
        self._socket.close()
        await self._task

    async def _watch(self) -> None:
        with contextlib.suppress(ClosedError):
            while True:
                self._catch_up()
                if self._ended and self._timer is None:
                    self._timer = asyncio.get_running_loop().call_later(self._seconds, self._renew)
                await self._socket.wait()

    def _catch_up(self) -> None:
        """Learn what libzmq does: right after the end of a connection it says that it will try again, or never."""
        while (parts := self._socket.receive_now()) is not None:
            event = zmq.Event(parse_monitor_message(parts)["event"])
            reason = _FAILURES.get(event)
            if reason is None:
                self._ended = event == zmq.EVENT_DISCONNECTED
            else:
                self._repeated_log.begin(reason, _log.warning, "handshake failed", address=self._address, reason=reason)

    def _renew(self) -> None:
        self._timer = None
        self._catch_up()
        if self._ended:
            self._ended = False
            self._connection.connect_anew(self._address)
