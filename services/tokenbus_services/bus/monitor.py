"""The connections of a listening ZeroMQ socket, as libzmq's monitor reports them."""

import asyncio
import contextlib
import errno
import os
import socket as sockets
from collections import OrderedDict
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from tokenbus_services.bus.accepted import Accepted, bytes_on_the_wire
from tokenbus_services.bus.allowed import AllowList
from tokenbus_services.bus.gate import HANDSHAKE, USER, Gate
from tokenbus_services.bus.guard import Guard
from tokenbus_services.bus.identity import ANONYMOUS, Identity
from tokenbus_services.settings import BusSettings

_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED | _FAILURES
_BATCH = 1000
_MOST_CUT = 4096
_ID_BYTES = 5
_NO_RIGHTS = Identity("", frozenset(), ())


class Monitor:
    """Knows each connection, says of each that was turned away or cut off why, and counts what is read of it.

    libzmq reports that a connection ended, but not which side ended it. So each connection's descriptor is duplicated
    while it lasts, and asked at its end whether the peer had closed it. No handshake is done before that (see Gate), so
    a connection that ended too early for it had not come so far.
    Events are read by the guard's thread and, before a handshake is answered, on the event loop; the guard's lock is
    held meanwhile.
    """

    def __init__(  # noqa: PLR0913 - what it stands between
        self,
        socket: "zmq.Socket[bytes]",
        listening: int,
        settings: BusSettings,
        refused: Callable[[str], None],
        *,
        is_read_out: Callable[[], bool],
        gate: Gate,
        guard: Guard,
        allowed: AllowList | None = None,
    ) -> None:
        """Watch a socket that is not bound yet, and will accept connections from a descriptor.

        An allow-list is that of a listener that asks for keys.
        """
        self._allowed = allowed
        self._allowed_version = 0 if allowed is None else allowed.version
        self.connections: dict[int, Accepted] = {}
        self.is_read_out = is_read_out
        self._by_peer: dict[bytes, Accepted] = {}
        self._cut_peers: OrderedDict[bytes, None] = OrderedDict()  # what they have sent may still come
        self._socket = socket.get_monitor_socket(_EVENTS)
        self.descriptor = int(self._socket.getsockopt(zmq.FD))
        self._listening: sockets.socket | None = sockets.socket(fileno=os.dup(listening))
        self._with_curve = socket.getsockopt(zmq.MECHANISM) == zmq.CURVE
        self._settings = settings
        self._refused = refused
        self._failure: str | None = None
        self._silenced = False
        self._loop = asyncio.get_running_loop()
        self._stopped = self._loop.create_future()
        self._gate = gate
        self.guard = guard
        gate.watchers.append(self)
        guard.watch(self)

    def silence(self) -> None:
        """Say nothing any more: what ends from now on is ended by its owner."""
        self._gate.watchers.remove(self)
        with self.guard.lock:
            self._silenced = True
            for connection in self.connections.values():
                connection.close()
            self.connections.clear()
            self._by_peer.clear()
            if self._listening is not None:
                self._listening.close()
                self._listening = None

    async def stopped(self) -> None:
        """Wait until the watched socket, which was closed, has sent what it had, or its linger is over."""
        await asyncio.wait([self._stopped])

    # What is read.

    def read(self, frame: zmq.Frame, parts: list[bytes]) -> bytes | None:
        """Count a message, of which the first frame was left as it came, and return its peer; None: drop it."""
        peer = frame.bytes
        connection = self._by_peer.get(peer)
        if connection is None:
            if peer in self._cut_peers:
                return None
            connection = self._meet(peer, frame)
            if connection is None:  # its connection has ended
                return peer
        if connection.is_cut or connection.cut_at is not None:
            return None
        connection.delivered += bytes_on_the_wire(parts, with_curve=self._with_curve)
        return peer

    def identity(self, peer: bytes) -> Identity:
        """Return who a peer is; its rights are those that the allow-list gives its key now."""
        if self._allowed is None:
            return ANONYMOUS
        connection = self._by_peer.get(peer)
        return (connection and self._allowed.find(connection.public)) or _NO_RIGHTS

    def cut_revoked(self) -> None:
        """Cut off the peers whose keys are not allowed any more."""
        if self._allowed is None:
            return
        self._allowed.refresh()
        if self._allowed.version == self._allowed_version:
            return
        self._allowed_version = self._allowed.version
        with self.guard.lock:
            for connection in self._by_peer.values():
                self._check_key(connection)

    def _check_key(self, connection: Accepted) -> None:
        if self._allowed is not None and self._allowed.find(connection.public) is None:
            self.guard.cut(self, connection, "key", "its key was revoked")

    def admit(self, peer: bytes) -> None:
        """Take note that a peer has introduced itself."""
        if (connection := self._by_peer.get(peer)) is not None:
            connection.is_admitted = True

    def disconnect(self, peer: bytes) -> None:
        """Read nothing more of a peer, and cut it off when what was sent to it is out."""
        if (connection := self._by_peer.get(peer)) is not None and connection.cut_at is None:
            self.guard.dismiss(connection)

    def _meet(self, peer: bytes, frame: zmq.Frame) -> Accepted | None:
        with self.guard.lock:
            connection = self.connections.get(int(frame.get(zmq.SRCFD)))
            # A descriptor whose connection has ended may be another's by now, whose handshake came later.
            if connection is None or connection.peer or int(frame.get(HANDSHAKE)) <= connection.handshakes:
                return None
            connection.peer = peer
            self._by_peer[peer] = connection
            if len(peer) != _ID_BYTES or peer[0]:
                # libzmq lets a peer choose, even another's that has just left; or megabytes, copied for each message.
                self.guard.cut(self, connection, "id", f"it chose an id for itself, of {len(peer)} bytes")
            if self._allowed is not None:
                connection.public = str(frame.get(USER))
                self._check_key(connection)  # it had been let in, so it was revoked since then
            return connection

    # What libzmq reports.

    def catch_up(self) -> None:
        """Take note of all connections that came and went."""
        with self.guard.lock:
            events: list[tuple[int, int]] = []
            with contextlib.suppress(zmq.Again):
                while not self._stopped.done() and not self._socket.closed:
                    message = parse_monitor_message(self._socket.recv_multipart(zmq.NOBLOCK))
                    events.append((int(message["event"]), int(message["value"])))
                    if len(events) == _BATCH:
                        self._take(events)
                        events.clear()
            self._take(events)

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
            self._take_one(event, value, late=late)
        if any(event == zmq.EVENT_ACCEPT_FAILED for event, _ in events) and self._listening is not None:
            self.tell(None, "no connection can be accepted: no descriptor is left")
            self.guard.starve(self._listening)

    def _take_one(self, event: int, value: int, *, late: bool) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._forget(value)
            if not late and not self._silenced:
                self._accept(value)
        elif event & _FAILURES:
            self._failure = self._why(event, value)  # the next event is this connection's end
        elif event == zmq.EVENT_DISCONNECTED:
            self._tell_end(self.connections.get(value))
            self._forget(value)
        elif event == zmq.EVENT_MONITOR_STOPPED:
            self._stop()

    def _accept(self, descriptor: int) -> None:
        connection = self.guard.accept(descriptor, self._gate.handshakes)
        if connection is not None:
            self.connections[descriptor] = connection
            self.guard.make_room()

    def _stop(self) -> None:
        self.guard.release(self)
        self._socket.close()
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if not self._stopped.done():
            self._stopped.set_result(None)

    def _tell_end(self, connection: Accepted | None) -> None:
        reason, self._failure = self._failure, None
        if connection is not None and (connection.is_cut or connection.cut_at is not None):
            return  # for a reason that was given then
        if reason is None and connection is None:
            reason = "what it sent is not this protocol"
        elif reason is None and connection is not None and not connection.was_closed_by_peer():
            most = self._settings.max_part_bytes
            reason = f"cut off: what it sent is not this protocol, or has a part above {most} bytes"
        if reason is not None:
            self.tell(connection, reason)

    def tell(self, connection: Accepted | None, reason: str) -> None:
        """Say why a connection was cut off."""
        if not self._silenced:
            name = "a peer" if connection is None else str(connection)
            # Through the loop, so that an error of the callee's is not taken for one of the monitor's.
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(self._refused, f"{name}: {reason}")

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
        connection = self.connections.pop(descriptor, None)
        if connection is not None:
            if self._by_peer.get(connection.peer) is connection:
                del self._by_peer[connection.peer]
                if connection.is_cut or connection.cut_at is not None:
                    self._cut_peers[connection.peer] = None
                    if len(self._cut_peers) > _MOST_CUT:
                        self._cut_peers.popitem(last=False)
            connection.close()
