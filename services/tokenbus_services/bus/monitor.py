"""What a listening ZeroMQ socket turns away, as libzmq's monitor tells."""

import asyncio
import contextlib
import errno
import os
import select
import socket as sockets
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from tokenbus_services.bus.gate import Gate
from tokenbus_services.bus.sockets import LoopSocket
from tokenbus_services.settings import BusSettings

_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED | _FAILURES
_BATCH = 1000


class Monitor:
    """Tells each peer that was turned away or cut off, with one line.

    libzmq tells that a connection ended, but not which side ended it. So each connection's descriptor is duplicated
    while it lasts, and asked at its end whether the peer had closed it. No handshake is done before that (see Gate), so
    a connection that ended too early for it had not come so far.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        settings: BusSettings,
        refused: Callable[[str], None],
        gate: Gate,
        ended: Callable[[int], None],
    ) -> None:
        """Watch a socket that is not bound yet; `ended` is called with the descriptor of each connection that ended."""
        self._socket = LoopSocket(socket.get_monitor_socket(_EVENTS), "monitor")
        self._settings = settings
        self._refused = refused
        self._ended = ended
        self._connections: dict[int, sockets.socket] = {}
        self._failure: str | None = None
        self._silenced = False
        self._stopped = False
        self._gate = gate
        gate.watchers.append(self)
        self._task = asyncio.create_task(self._watch())

    def catch_up(self) -> None:
        """Look at all connections there are."""
        events = []
        while (parts := self._socket.receive_now()) is not None:
            message = parse_monitor_message(parts)
            events.append((int(message["event"]), int(message["value"])))
            if len(events) == _BATCH:
                self._take(events)
                events.clear()
        self._take(events)

    def cut(self, descriptor: int, reason: str = "") -> None:
        """Cut off the connection of a descriptor, which libzmq closes then; a reason is told as that of a refusal."""
        connection = self._connections.get(descriptor)
        if connection is not None:
            if reason:
                asyncio.get_running_loop().call_soon(self._refused, f"{_name(connection)}: {reason}")
            with contextlib.suppress(OSError):  # it ends just now
                connection.shutdown(sockets.SHUT_RDWR)

    def silence(self) -> None:
        """Tell nothing any more: what ends from now on is ended by its owner."""
        self._gate.watchers.remove(self)
        self._silenced = True
        while self._connections:
            self._connections.popitem()[1].close()

    async def stopped(self) -> None:
        """Wait until the watched socket, which was closed, has sent what it had, or its linger is over."""
        await asyncio.wait([self._task])
        self._task.result()

    async def _watch(self) -> None:
        # To the last event: with nobody to take it, libzmq's thread would wait, and with it all its other sockets.
        try:
            while True:
                self.catch_up()
                if self._stopped:
                    break
                await self._socket.wait()
        finally:
            self._socket.close()

    def _take(self, events: list[tuple[int, int]]) -> None:
        # A descriptor whose connection has ended may be another's by now.
        ended: set[int] = set()
        is_late = []
        for event, value in reversed(events):
            is_late.append(event == zmq.EVENT_ACCEPTED and value in ended)
            if event == zmq.EVENT_DISCONNECTED:
                ended.add(value)
            elif event == zmq.EVENT_ACCEPTED:
                ended.discard(value)
        for (event, value), late in zip(events, reversed(is_late), strict=True):
            if event == zmq.EVENT_ACCEPTED:
                self._forget(value)
                if not late and not self._silenced:
                    with contextlib.suppress(OSError):  # it ends just now
                        self._connections[value] = _duplicate(value)
            elif event & _FAILURES:
                self._failure = self._why(event, value)  # the next event is this connection's end
            elif event == zmq.EVENT_DISCONNECTED:
                self._tell(self._connections.get(value))
                self._forget(value)
                self._ended(value)
            elif event == zmq.EVENT_MONITOR_STOPPED:
                self._stopped = True

    def _tell(self, connection: sockets.socket | None) -> None:
        reason, self._failure = self._failure, None
        if reason is None and connection is None:
            reason = "what it sent is not this protocol"
        elif reason is None and connection is not None and not _was_closed_by_peer(connection):
            most = self._settings.max_part_bytes
            reason = f"cut off: what it sent is not this protocol, or has a part above {most} bytes"
        if reason is not None and not self._silenced:
            # Through the loop, so that an error of the callee's is not taken for one of the monitor's.
            asyncio.get_running_loop().call_soon(self._refused, f"{_name(connection)}: {reason}")

    def _why(self, event: int, value: int) -> str:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "its key is not allowed"
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return "its handshake is of another mechanism: one side has a key, and the other none"
        if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            return "its handshake is for another key than this listener's"
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
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)  # not a read: a peer may leave with much of what it sent unread
    return bool(poll.poll(0))


def _name(connection: sockets.socket | None) -> str:
    with contextlib.suppress(OSError):
        where = connection.getpeername() if connection is not None else None
        if isinstance(where, tuple):
            return f"{where[0]}:{where[1]}"
    return "a peer"
