"""What a listening ZeroMQ socket turns away, as libzmq's monitor tells."""

import asyncio
import contextlib
import errno
import os
import socket as sockets
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from tokenbus_services.bus.errors import ClosedError
from tokenbus_services.bus.sockets import LoopSocket
from tokenbus_services.settings import BusSettings

_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | _FAILURES


class Monitor:
    """Tells each peer that was turned away or cut off, with one line.

    libzmq tells that a connection ended, but not which side ended it. So each connection's descriptor is duplicated
    while it lasts, and asked at its end whether the peer had closed it.
    """

    def __init__(
        self, socket: "zmq.Socket[bytes]", listening: int, settings: BusSettings, refused: Callable[[str], None]
    ) -> None:
        """Watch a socket that is not bound yet, but will be to this descriptor."""
        self.unbound = asyncio.Event()
        self._watched = socket
        self._socket = LoopSocket(socket.get_monitor_socket(_EVENTS), "monitor")
        self._listening = listening
        self._settings = settings
        self._refused = refused
        self._connections: dict[int, sockets.socket] = {}
        self._failure: str | None = None
        self._silenced = False
        self._task = asyncio.create_task(self._watch())

    def silence(self) -> None:
        """Tell nothing any more: what ends from now on is ended by its owner."""
        self._silenced = True

    async def close(self) -> None:
        """Stop watching."""
        self._watched.disable_monitor()
        self._socket.close()
        await self._task
        while self._connections:
            self._connections.popitem()[1].close()

    async def _watch(self) -> None:
        with contextlib.suppress(ClosedError):
            while True:
                message = parse_monitor_message(await self._socket.receive())
                self._take(message["event"], message["value"])

    def _take(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._forget(value)
            # It may have ended already; then its end is the next event of this descriptor.
            with contextlib.suppress(OSError):
                self._connections[value] = _duplicate(value)
        elif event & _FAILURES:
            self._failure = self._why(event, value)  # the next event is this connection's end
        elif event == zmq.EVENT_DISCONNECTED:
            self._tell(self._connections.get(value))
            self._forget(value)
        elif event == zmq.EVENT_CLOSED and value == self._listening:
            self.unbound.set()

    def _tell(self, connection: sockets.socket | None) -> None:
        reason, self._failure = self._failure, None
        if reason is None and connection is not None and not _was_closed_by_peer(connection):
            most = self._settings.max_part_bytes
            reason = f"cut off: what it sent is not this protocol, or has a part above {most} bytes"
        if reason is not None and not self._silenced:
            # Through the loop, so that an error of the callee's is not taken for one of the monitor's.
            asyncio.get_running_loop().call_soon(self._refused, f"{_name(connection)}: {reason}")

    def _why(self, event: int, value: int) -> str:
        if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            return "its handshake is not of this protocol"
        if value == errno.EAGAIN:
            return f"no handshake within {self._settings.heartbeat_timeout_ms} ms"
        return "it left before the handshake was done"

    def _forget(self, descriptor: int) -> None:
        if descriptor in self._connections:
            self._connections.pop(descriptor).close()


def _duplicate(descriptor: int) -> sockets.socket:
    duplicate = os.dup(descriptor)
    try:
        return sockets.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _was_closed_by_peer(connection: sockets.socket) -> bool:
    try:
        return not connection.recv(1, sockets.MSG_PEEK | sockets.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:  # reset
        return True


def _name(connection: sockets.socket | None) -> str:
    with contextlib.suppress(OSError):
        where = connection.getpeername() if connection is not None else None
        if isinstance(where, tuple):
            return f"{where[0]}:{where[1]}"
    return "a peer"
