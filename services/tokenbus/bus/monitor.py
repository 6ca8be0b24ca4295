"""Monitor: tracks the connections of a listening ZeroMQ socket through the events of libzmq's monitor socket."""

import asyncio
import contextlib
import errno
import os
import socket as sockets
from collections import OrderedDict
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from tokenbus.bus.accepted import AcceptedConnection, bytes_on_the_wire, local_address_of
from tokenbus.bus.allow_list import AllowList
from tokenbus.bus.guard import Guard
from tokenbus.bus.transport import ANONYMOUS, Identity
from tokenbus.bus.zap import HANDSHAKE, USER, Authenticator
from tokenbus.settings import BusSettings

_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED | _FAILURES
_BATCH = 1000
_ACCEPTED_AT_ONCE = 32
"""Number of events between two calls of `make_room`, because each call costs time."""
_MAX_CUT = 4096
_ID_BYTES = 5
_NO_RIGHTS = Identity("", frozenset(), ())


class Monitor:
    """Tracks each connection, counts the bytes read from it, and reports the reason if it is refused or cut off.

    libzmq does not report which side ended a connection. The monitor keeps a duplicate of each descriptor, which shows
    whether the peer closed the connection. The duplicate is made before the handshake is answered (see Authenticator).
    The guard's thread reads events periodically, and the event loop reads events before it answers a handshake. Both
    threads hold the guard's lock while they read.
    """

    def __init__(  # noqa: PLR0913 - it connects them
        self,
        socket: "zmq.Socket[bytes]",
        listening: int,
        settings: BusSettings,
        refused: Callable[[str], None],
        *,
        is_read_out: Callable[[], bool],
        authenticator: Authenticator,
        guard: Guard,
        allowed: AllowList | None,
    ) -> None:
        """Monitor a socket that is not bound yet; the socket will accept connections at the descriptor `listening`.

        `refused` is called with one line for each peer that is refused or cut off. `is_read_out` returns whether every
        message was read. `allowed` is the allow-list, or None if the listener asks for no keys.
        """
        self.allowed = allowed
        self._allowed_version = 0 if allowed is None else allowed.version
        self.connections: dict[int, AcceptedConnection] = {}
        """Accepted connections by libzmq's descriptor numbers."""
        self._is_read_out = is_read_out
        self._by_peer: dict[bytes, AcceptedConnection] = {}
        self._cut_peers: OrderedDict[bytes, None] = OrderedDict()  # cut-off peers whose messages may still arrive
        self._socket = socket.get_monitor_socket(_EVENTS)
        self.descriptor = int(self._socket.getsockopt(zmq.FD))
        """Descriptor that is readable while monitor events wait to be read."""
        self._listening = sockets.socket(fileno=os.dup(listening))
        self._local_address = local_address_of(self._listening)
        self._with_curve = socket.getsockopt(zmq.MECHANISM) == zmq.CURVE
        self._settings = settings
        self._refused = refused
        self._failure: str | None = None
        self._silenced = False
        self._loop = asyncio.get_running_loop()
        self.stopped = asyncio.Event()
        """Event that is set once the closed socket has sent its messages or its linger time is over."""
        self._authenticator = authenticator
        self.guard = guard
        authenticator.before_answer.append(self.catch_up)
        guard.watch(self)

    def silence(self) -> None:
        """Stop reporting, because the owner closes the socket."""
        self._authenticator.before_answer.remove(self.catch_up)
        with self.guard.lock:
            self._silenced = True
            for connection in self.connections.values():
                connection.connection.close()
            self.connections.clear()
            self._by_peer.clear()
            self._listening.close()

    def read(self, frame: zmq.Frame, parts: list[bytes]) -> bytes | None:
        """Count a message and return its peer, or None if the message must be dropped; `frame` is the peer's id."""
        peer = frame.bytes
        connection = self._by_peer.get(peer)
        if connection is None:
            if peer in self._cut_peers:
                return None
            connection = self._identify(peer, frame)
            if connection is None:  # the peer's connection has ended
                return peer
        if connection.is_cut or connection.cut_at is not None:
            return None
        connection.delivered += bytes_on_the_wire(parts, with_curve=self._with_curve)
        if not connection.is_admitted and connection.delivered > self._settings.max_unadmitted_bytes:
            most = self._settings.max_unadmitted_bytes
            reason = f"it has sent {connection.delivered} bytes and not introduced itself, more than {most}"
            with self.guard.lock:
                self.guard.cut(connection, "bytes", reason)
            return None
        return peer

    def identity(self, peer: bytes) -> Identity:
        """Return a peer's identity in the current allow-list."""
        if self.allowed is None:
            return ANONYMOUS
        connection = self._by_peer.get(peer)
        return (connection and self.allowed.find(connection.public)) or _NO_RIGHTS

    def is_connected(self, peer: bytes) -> bool:
        return peer in self._by_peer

    def cut_revoked(self) -> None:
        if self.allowed is None:
            return
        self.allowed.refresh()
        if self.allowed.version == self._allowed_version:
            return
        self._allowed_version = self.allowed.version
        with self.guard.lock:
            for connection in self._by_peer.values():
                self._check_key(connection)

    def _check_key(self, connection: AcceptedConnection) -> None:
        if self.allowed is not None and self.allowed.find(connection.public) is None:
            self.guard.cut(connection, "key", "its key was revoked")

    def admit(self, peer: bytes) -> None:
        if (connection := self._by_peer.get(peer)) is not None:
            connection.is_admitted = True

    def disconnect(self, peer: bytes) -> None:
        """Drop further messages from a peer, and cut the peer off after a delay for reading its last messages."""
        if (connection := self._by_peer.get(peer)) is not None and connection.cut_at is None:
            self.guard.dismiss(connection)

    def _identify(self, peer: bytes, frame: zmq.Frame) -> AcceptedConnection | None:
        with self.guard.lock:
            connection = self.connections.get(int(frame.get(zmq.SRCFD)))
            # The message's connection may have ended, and a new connection may use the same descriptor number.
            # The new connection is recognised by its later handshake.
            if connection is None or connection.peer or int(frame.get(HANDSHAKE)) <= connection.handshakes:
                return None
            connection.peer = peer
            self._by_peer[peer] = connection
            if len(peer) != _ID_BYTES or peer[0]:
                # libzmq lets a peer choose a huge id, or the id of a peer that has just left.
                self.guard.cut(connection, "id", f"it chose an id for itself, of {len(peer)} bytes")
            if self.allowed is not None:
                connection.public = str(frame.get(USER))
                self._check_key(connection)  # the key may have been revoked since the handshake
            return connection

    def catch_up(self) -> None:
        with self.guard.lock:
            events: list[tuple[int, int]] = []
            with contextlib.suppress(zmq.Again):
                while not self.stopped.is_set() and not self._socket.closed:
                    message = parse_monitor_message(self._socket.recv_multipart(zmq.NOBLOCK))
                    events.append((int(message["event"]), int(message["value"])))
                    if len(events) == _BATCH:
                        self._handle(events)
                        events.clear()
            self._handle(events)

    def _handle(self, events: list[tuple[int, int]]) -> None:
        ends = {value: number for number, (event, value) in enumerate(events, 1) if event == zmq.EVENT_DISCONNECTED}
        for number, (event, value) in enumerate(events, 1):
            # If a connection ends later in this batch, its descriptor number may already belong to another connection.
            self._handle_one(event, value, has_ended=ends.get(value, 0) > number)
            if number % _ACCEPTED_AT_ONCE == 0:
                self.guard.make_room()
        self.guard.make_room()
        if any(event == zmq.EVENT_ACCEPT_FAILED for event, _ in events) and not self._silenced:
            self.report(None, "no connection can be accepted: no descriptor is left")
            self.guard.free_descriptors(self._listening)

    def _handle_one(self, event: int, value: int, *, has_ended: bool) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._forget(value)
            if not has_ended and not self._silenced:
                with contextlib.suppress(OSError):  # the connection has ended already
                    connection = self.guard.accept(value, self._local_address, self._authenticator.handshakes)
                    connection.report, connection.is_read_out = self.report, self._is_read_out
                    self.connections[value] = connection
        elif event & _FAILURES:
            self._failure = self._why(event, value)  # the next event reports the end of the same connection
        elif event == zmq.EVENT_DISCONNECTED:
            self._report_end(self.connections.get(value))
            self._forget(value)
        elif event == zmq.EVENT_MONITOR_STOPPED:
            self.guard.release(self)
            self._socket.close()
            with contextlib.suppress(RuntimeError):  # the event loop has closed
                self._loop.call_soon_threadsafe(self.stopped.set)

    def _report_end(self, connection: AcceptedConnection | None) -> None:
        reason, self._failure = self._failure, None
        if connection is not None and (connection.is_cut or connection.cut_at is not None):
            return  # the reason was reported when the connection was cut off
        if reason is None and connection is None:
            reason = "it did not speak this protocol"
        elif reason is None and connection and not connection.was_closed_by_peer():
            most = self._settings.max_part_bytes
            reason = f"cut off: it did not speak this protocol, or sent a part above {most} bytes"
        if reason is not None:
            self.report(connection, reason)

    def report(self, connection: AcceptedConnection | None, reason: str) -> None:
        if not self._silenced:
            name = "a peer" if connection is None else str(connection)
            # The callback runs on the event loop, so its errors do not appear as errors of the monitor.
            with contextlib.suppress(RuntimeError):  # the event loop has closed
                self._loop.call_soon_threadsafe(self._refused, f"{name}: {reason}")

    def _why(self, event: int, value: int) -> str:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "its key is not allowed"
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return "its handshake uses another mechanism: one side has a key, and the other has none"
        if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            return "its handshake is for another key than this listener's"
        if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            return "its handshake does not follow this protocol"
        if value == errno.EAGAIN:
            return "no handshake in time"
        return "it left before the handshake was done"

    def _forget(self, descriptor: int) -> None:
        connection = self.connections.pop(descriptor, None)
        if connection is not None:
            if self._by_peer.get(connection.peer) is connection:
                del self._by_peer[connection.peer]
                if connection.is_cut or connection.cut_at is not None:
                    self._cut_peers[connection.peer] = None
                    if len(self._cut_peers) > _MAX_CUT:
                        self._cut_peers.popitem(last=False)
            connection.connection.close()
