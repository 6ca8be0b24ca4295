"""The ZeroMQ transport: a ROUTER socket listens, and DEALER sockets connect, over TCP or Unix sockets."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from tokenbus.bus.addresses import TcpEndpoint, parse, parse_remote
from tokenbus.bus.binding import Binding, bind
from tokenbus.bus.errors import AddressError, ClosedError
from tokenbus.bus.guard import Guard
from tokenbus.bus.keys import ProcessKeys, use_key
from tokenbus.bus.monitor import Monitor
from tokenbus.bus.sockets import LoopSocket
from tokenbus.bus.transport import Outcome, Parts, check_message
from tokenbus.bus.zap import KEYS_DOMAIN, OPEN_DOMAIN, Authenticator
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.printable import reason_of
from tokenbus.settings import BusSettings

_KEYS_SECONDS = 1.0  # interval at which a listener disconnects the peers whose keys were revoked
_HANDSHAKE_MS = 60_000
_MAX_UNREAD = 64  # number of unread messages of a peer at which backpressure begins, long before the peer is cut off
_MAX_PROBES = 127  # Linux's maximum of TCP keepalive probes; with a larger value libzmq refuses every connection
_ALIVE = zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_RETRIED
_FAILURES = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the listener does not allow this process's key (bus.key_file)",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the listener asks for a key and this process has none, or the reverse",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it is not a processor, or its key is not the one of bus.server_key",
}
_EVENTS = _ALIVE | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | sum(_FAILURES)
_log = logger("bus")


class SharedContext:
    """A ZeroMQ context that exists while one of its sockets is open; after closing a socket, callers call `leave`."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._listening: tuple[Authenticator, Guard] | None = None
        self._open = 0

    def socket(self, kind: int) -> "zmq.Socket[bytes]":
        if self._context is None:
            self._context = zmq.Context()
        socket = self._context.socket(kind)
        self._open += 1
        return socket

    def listening(self, settings: BusSettings) -> tuple[Authenticator, Guard]:
        """Return the authenticator and guard of all listening sockets; requires an open socket."""
        if self._listening is None and self._context is not None:
            self._listening = Authenticator(self._context), Guard(settings, self._now)
        if self._listening is None:
            raise RuntimeError("no socket is open")
        return self._listening

    async def leave(self) -> None:
        """Count a closed socket; after the last socket, terminate the context once unsent messages are sent."""
        self._open -= 1
        if self._open or self._context is None:
            return
        context, listening = self._context, self._listening
        self._context = self._listening = None
        try:
            for each in listening or ():
                await each.close()
        finally:
            await asyncio.to_thread(context.term)


class ZeroMQTransport:
    """Transport for `tcp://HOST:PORT` and `ipc://PATH`; it holds no resources while no socket is open."""

    def __init__(self, settings: BusSettings, now: Callable[[], float] = time.monotonic) -> None:
        self.connected: Callable[[int], None] = lambda _: None
        """Callback that gets the descriptor of each connection once a listener has accepted it."""
        self._settings = settings
        self._keys = ProcessKeys(settings)
        # Connecting sockets have a context without an authenticator.
        # With an authenticator, a closing connection would lose its last messages.
        self._listening = SharedContext(now)
        self._connecting = SharedContext(now)

    async def listen(self, address: str, refused: Callable[[str], None] = lambda _: None) -> "ZeroMQListener":
        keys = self._keys.for_listener(parse(address))
        binding = await bind(address)
        socket = _socket(self._listening, zmq.ROUTER, self._settings)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.IPV6, int("[" in binding.address))
        socket.setsockopt(zmq.USE_FD, binding.descriptor)
        socket.setsockopt(zmq.RCVHWM, min(_MAX_UNREAD, self._settings.high_water_mark))
        authenticator, guard = self._listening.listening(self._settings)
        allowed = None
        if keys is not None:
            own, allowed = keys
            use_key(socket, own)
            socket.setsockopt(zmq.ZAP_DOMAIN, KEYS_DOMAIN)
            authenticator.allowed = allowed
        listening = LoopSocket(socket, f"listener at {binding.address}")
        monitor = Monitor(
            socket,
            binding.descriptor,
            self._settings,
            refused,
            is_read_out=lambda: listening.is_read_out() and authenticator.is_read_out(),
            authenticator=authenticator,
            guard=guard,
            allowed=allowed,
        )
        try:
            socket.bind(binding.address)
        except zmq.ZMQError as error:
            monitor.silence()
            listening.stop()
            socket.close(linger=0)
            binding.release()
            await monitor.stopped.wait()
            await self._listening.leave()
            raise AddressError(address, reason_of(error)) from None
        binding.hand_over()
        return ZeroMQListener(listening, binding, monitor, self._settings, self._listening)

    async def connect(self, address: str, lost: Callable[[], None] = lambda: None) -> "ZeroMQConnection":
        endpoint = parse_remote(address)
        keys = self._keys.for_connection(endpoint)
        socket = _socket(self._connecting, zmq.DEALER, self._settings)
        socket.setsockopt(zmq.IPV6, int(isinstance(endpoint, TcpEndpoint) and endpoint.is_v6))
        if keys is not None:
            use_key(socket, *keys)
        connection = ZeroMQConnection(socket, address, self._settings, self._connecting, lost, self.connected)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            await connection.close()
            raise AddressError(address, reason_of(error)) from None
        return connection


def _socket(context: SharedContext, kind: int, settings: BusSettings) -> "zmq.Socket[bytes]":
    silence = settings.heartbeat_timeout_ms
    interval = max(1, settings.heartbeat_interval_ms // 1000)  # the kernel counts keepalive in seconds
    options: dict[int, int | bytes] = {
        zmq.LINGER: settings.linger_ms,
        zmq.SNDHWM: settings.high_water_mark,
        zmq.RCVHWM: settings.high_water_mark,
        zmq.MAXMSGSIZE: settings.max_part_bytes,
        # The handshake limit is long, because a listener is slow while many peers connect at once.
        # If slow peers gave up and retried, no handshake would ever succeed. The guard limits silent peers.
        zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
        zmq.CONNECT_TIMEOUT: silence,
        # HEARTBEAT_IVL is not used, because libzmq 4.3 can abort the process when a peer with unread messages leaves.
        # TCP keepalive detects dead hosts. The heartbeats of the stream protocol detect hanging processes.
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: interval,
        zmq.TCP_KEEPALIVE_INTVL: interval,
        zmq.TCP_KEEPALIVE_CNT: max(1, min(silence // (1000 * interval) - 1, _MAX_PROBES)),
        zmq.TCP_MAXRT: silence,
        # The reconnect intervals are random, because libzmq itself only doubles a fixed interval.
        # With equal intervals, all peers of a lost listener would retry at the same moments.
        zmq.RECONNECT_IVL: random.randint(-(-settings.reconnect_ms // 2), settings.reconnect_ms),  # noqa: S311
        zmq.RECONNECT_IVL_MAX: random.randint(settings.reconnect_ms, settings.reconnect_max_ms),  # noqa: S311
        # Without a ZAP domain, libzmq also accepts its protocol of 2009, which has no handshake.
        # Without a handshake, random bytes arrive as a message, and a browser stays connected forever.
        zmq.ZAP_DOMAIN: OPEN_DOMAIN,
    }
    socket = context.socket(kind)
    for option, value in options.items():
        socket.setsockopt(option, value)
    return socket


class ZeroMQListener:
    """A listening ROUTER socket; a peer's id is libzmq's routing id of the connection."""

    def __init__(
        self, socket: LoopSocket, binding: Binding, monitor: Monitor, settings: BusSettings, context: SharedContext
    ) -> None:
        self.address = binding.address
        self.budget = socket.budget
        self.identity, self.is_connected = monitor.identity, monitor.is_connected
        self.admit, self.disconnect = monitor.admit, monitor.disconnect
        self.is_reachable, self.usage = binding.is_reachable, monitor.guard.usage
        self._socket = socket
        self._binding = binding
        self._monitor = monitor
        self._max_part_bytes = settings.max_part_bytes
        self._context = context
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        if monitor.allowed is not None:
            self._check_keys()

    async def receive(self) -> tuple[bytes, list[bytes]]:
        while True:
            frame, parts = await self._socket.receive_from()
            if (peer := self._monitor.read(frame, parts)) is not None:
                return peer, parts

    def send(self, peer: bytes, parts: Parts) -> Outcome:
        check_message(parts, self._max_part_bytes)
        try:
            self._socket.send((peer, *parts))
        except zmq.Again:
            return Outcome.FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return Outcome.GONE
            raise
        return Outcome.SENT

    def _check_keys(self) -> None:
        self._monitor.cut_revoked()
        self._timer = asyncio.get_running_loop().call_later(_KEYS_SECONDS, self._check_keys)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._monitor.silence()
        self._socket.close()
        self._binding.release()
        try:
            await self._monitor.stopped.wait()
        finally:
            await self._context.leave()


class ZeroMQConnection:
    """A connecting DEALER socket, which reports broken connections and reconnects when libzmq does not.

    libzmq never reconnects after invalid bytes or a part above the size limit. Without this class, a worker that once
    reached another kind of server would stay disconnected until its restart.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - `connect` makes it
        self,
        socket: "zmq.Socket[bytes]",
        address: str,
        settings: BusSettings,
        context: SharedContext,
        lost: Callable[[], None],
        connected: Callable[[int], None],
    ) -> None:
        """Monitor a socket that does not connect yet.

        `connected` is called with the descriptor of each accepted connection, and `lost` when a connection breaks.
        """
        self._watched, self._address, self._context = socket, address, context
        self._lost, self._connected = lost, connected
        self._max_part_bytes = settings.max_part_bytes
        self._reconnect_seconds = settings.reconnect_max_ms / 1000
        self._socket = LoopSocket(socket, f"connection to {address}")
        self._events = LoopSocket(socket.get_monitor_socket(_EVENTS), f"monitor of {address}")
        self._descriptor = -1
        self._is_accepted = self._has_ended = self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._repeated_log = DeduplicatedLog()
        self._watching = asyncio.create_task(self._watch())

    async def receive(self) -> list[bytes]:
        return await self._socket.receive()

    def send(self, parts: Parts) -> bool:
        check_message(parts, self._max_part_bytes)
        try:
            self._socket.send(parts)
        except zmq.Again:
            return False
        return True

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._socket.stop()
            if self._timer is not None:
                self._timer.cancel()
            self._watched.disable_monitor()
            self._events.close()
            try:
                await self._watching
            finally:
                self._socket.close()
                await self._context.leave()

    async def _watch(self) -> None:
        with contextlib.suppress(ClosedError):
            while True:
                self._catch_up()
                if self._has_ended and self._timer is None:
                    self._timer = asyncio.get_running_loop().call_later(self._reconnect_seconds, self._reconnect)
                await self._events.wait()

    def _catch_up(self) -> None:
        """Read libzmq's events; if libzmq retries, a retry event immediately follows the event of the disconnect."""
        while (parts := self._events.receive_now()) is not None:
            message = parse_monitor_message(parts)
            event = zmq.Event(message["event"])
            reason = _FAILURES.get(event)
            if reason is None:
                self._has_ended = event == zmq.EVENT_DISCONNECTED
                if self._has_ended and self._is_accepted:
                    self._lost()
                self._is_accepted = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                if event == zmq.EVENT_CONNECTED:
                    self._descriptor = message["value"]
                elif self._is_accepted:
                    self._connected(self._descriptor)
            else:
                self._repeated_log.begin(reason, _log.warning, "handshake failed", address=self._address, reason=reason)

    def _reconnect(self) -> None:
        self._timer = None
        self._catch_up()
        if self._has_ended:
            self._has_ended = False
            self._socket.connect_anew(self._address)
