"""The transport over ZeroMQ: a ROUTER listens, DEALERs connect, over TCP or Unix sockets."""

import asyncio
import time
from collections.abc import Callable
from types import MappingProxyType

import zmq

from tokenbus_services.bus.addresses import TcpEndpoint, parse, parse_remote
from tokenbus_services.bus.binding import Binding, bind
from tokenbus_services.bus.context import SharedContext
from tokenbus_services.bus.curve import Curve, prove, raw, serve
from tokenbus_services.bus.errors import AddressError
from tokenbus_services.bus.gate import KEYS_DOMAIN, OPEN_DOMAIN
from tokenbus_services.bus.identity import Identity
from tokenbus_services.bus.keeper import Keeper
from tokenbus_services.bus.monitor import Monitor
from tokenbus_services.bus.sockets import LoopSocket
from tokenbus_services.bus.transport import Outcome, Parts, Usage, check_message, ignore
from tokenbus_services.settings import BusSettings

_LOOK_SECONDS = 1.0
"""How often a listener looks whether a key of its peers was revoked."""
_MOST_UNREAD = 64
"""Messages of one peer that wait to be read: then it has to wait itself, long before it is cut off for their bytes."""


class ZeroMQTransport:
    """Listens and connects at `tcp://HOST:PORT` and `ipc://PATH`; holds nothing while no socket of its own is open."""

    def __init__(self, settings: BusSettings, now: Callable[[], float] = time.monotonic) -> None:
        """Take the bounds and times from the settings; `now` is the clock, in seconds, that peers' times go by."""
        self._settings = settings
        self._curve = Curve(settings)
        # Apart: a peer of ours that leaves does not wait for the gate, and would lose its last messages there.
        self._listening = SharedContext(now)
        self._connecting = SharedContext()

    async def listen(self, address: str, refused: Callable[[str], None] = ignore) -> "ZeroMQListener":
        """Listen at an address, or raise an AddressError; refused hears of each peer that is turned away or cut off."""
        keys = self._curve.for_listener(parse(address))
        binding = await bind(address)
        socket = _socket(self._listening, zmq.ROUTER, self._settings)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.IPV6, int("[" in binding.address))
        socket.setsockopt(zmq.USE_FD, binding.descriptor)
        socket.setsockopt(zmq.RCVHWM, min(_MOST_UNREAD, self._settings.high_water_mark))
        gate, guard = self._listening.gate(), self._listening.guard(self._settings)
        allowed, server_key = None, b""
        if keys is not None:
            own, allowed = keys
            serve(socket, own)
            socket.setsockopt(zmq.ZAP_DOMAIN, KEYS_DOMAIN)
            gate.allowed, server_key = allowed, raw(own.public)
        listening = LoopSocket(socket, f"listener at {binding.address}")
        monitor = Monitor(
            socket,
            binding.descriptor,
            self._settings,
            refused,
            is_read_out=listening.is_read_out,
            gate=gate,
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
            await monitor.stopped()
            await self._listening.leave()
            raise AddressError(address, (error.strerror or str(error)).lower()) from None
        binding.hand_over()
        return ZeroMQListener(
            listening, binding, monitor, server_key=server_key, settings=self._settings, context=self._listening
        )

    async def connect(self, address: str, server_key: bytes | None = None) -> "ZeroMQConnection":
        """Connect to an address, whether or not a listener is there yet, or raise an AddressError."""
        endpoint = parse_remote(address)
        keys = self._curve.for_connection(endpoint, server_key)
        socket = _socket(self._connecting, zmq.DEALER, self._settings)
        socket.setsockopt(zmq.IPV6, int(isinstance(endpoint, TcpEndpoint) and endpoint.is_v6))
        if keys is not None:
            prove(socket, *keys)
        connected = LoopSocket(socket, f"connection to {address}")
        keeper = Keeper(socket, connected, address, self._settings)
        connection = ZeroMQConnection(connected, keeper, self._settings, self._connecting)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            await connection.close()
            raise AddressError(address, (error.strerror or str(error)).lower()) from None
        return connection


def _socket(context: SharedContext, kind: int, settings: BusSettings) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    for option, value in _options(settings).items():
        socket.setsockopt(option, value)
    return socket


def _options(settings: BusSettings) -> MappingProxyType[int, int | bytes]:
    silence = settings.heartbeat_timeout_ms
    interval = max(1, settings.heartbeat_interval_ms // 1000)  # seconds, as the kernel counts
    return MappingProxyType(
        {
            zmq.LINGER: settings.linger_ms,
            zmq.SNDHWM: settings.high_water_mark,
            zmq.RCVHWM: settings.high_water_mark,
            zmq.MAXMSGSIZE: settings.max_part_bytes,
            zmq.HANDSHAKE_IVL: silence,
            zmq.CONNECT_TIMEOUT: silence,
            # Not HEARTBEAT_IVL: libzmq 4.3 aborts the process when it is time for a heartbeat and the peer has left
            # with more messages unread than the high-water mark. The kernel finds out about hosts that are gone; of
            # processes that hang, the stream protocol's own heartbeats tell.
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: interval,
            zmq.TCP_KEEPALIVE_INTVL: interval,
            zmq.TCP_KEEPALIVE_CNT: max(1, silence // (1000 * interval) - 1),
            zmq.TCP_MAXRT: silence,
            zmq.RECONNECT_IVL: settings.reconnect_ms,
            zmq.RECONNECT_IVL_MAX: settings.reconnect_max_ms,
            # Without a domain libzmq takes any bytes for its protocol of 2009, which has no handshake: random bytes
            # were received as a message, and a browser stayed connected for ever.
            zmq.ZAP_DOMAIN: OPEN_DOMAIN,
        }
    )


class ZeroMQListener:
    """A ROUTER; a peer's id is the one that libzmq gives its connection."""

    def __init__(  # noqa: PLR0913 - what `listen` has made
        self,
        socket: LoopSocket,
        binding: Binding,
        monitor: Monitor,
        *,
        server_key: bytes,
        settings: BusSettings,
        context: SharedContext,
    ) -> None:
        """Take a socket that is bound and watched."""
        self.address = binding.address
        self.server_key = server_key
        self._socket = socket
        self._binding = binding
        self._monitor = monitor
        self._max_part_bytes = settings.max_part_bytes
        self._context = context
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        if server_key:
            self._look_soon()

    async def receive(self) -> tuple[bytes, list[bytes]]:
        """Return the next message and its peer; busy peers take turns."""
        while True:
            frame, parts = await self._socket.receive_from()
            if (peer := self._monitor.read(frame, parts)) is not None:
                return peer, parts

    def send(self, peer: bytes, parts: Parts) -> Outcome:
        """Send to one peer, without waiting."""
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

    def identity(self, peer: bytes) -> Identity:
        """Return who a peer is, as far as the transport has proved it."""
        return self._monitor.identity(peer)

    def admit(self, peer: bytes) -> None:
        """Learn that a peer has introduced itself."""
        self._monitor.admit(peer)

    def disconnect(self, peer: bytes) -> None:
        """Receive nothing more from a peer, and cut it off when what was sent to it is out."""
        self._monitor.disconnect(peer)

    def is_reachable(self) -> bool:
        """Tell whether new connections can find it."""
        return self._binding.is_reachable()

    def is_read_out(self) -> bool:
        """Tell whether every message that has arrived was received, and another receive has found none."""
        return self._socket.is_read_out()

    def usage(self) -> Usage:
        """Return how much of its bounds is used, by all listeners of its transport together."""
        return self._monitor.guard.usage()

    def _look_soon(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """Cut the peers off whose keys were revoked."""
        self._monitor.cut_revoked()
        self._look_soon()

    async def close(self) -> None:
        """Close, when what was sent is out or after `linger_ms`; the address is free on return."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._monitor.silence()
        self._socket.close()
        self._binding.release()
        try:
            await self._monitor.stopped()
        finally:
            await self._context.leave()


class ZeroMQConnection:
    """A DEALER."""

    def __init__(self, socket: LoopSocket, keeper: Keeper, settings: BusSettings, context: SharedContext) -> None:
        """Take a socket that is connected, or will be."""
        self._socket = socket
        self._keeper = keeper
        self._max_part_bytes = settings.max_part_bytes
        self._context = context
        self._closed = False

    async def receive(self) -> list[bytes]:
        """Return the next message."""
        return await self._socket.receive()

    def send(self, parts: Parts) -> bool:
        """Send, without waiting; False if as much as may wait does."""
        check_message(parts, self._max_part_bytes)
        try:
            self._socket.send(parts)
        except zmq.Again:
            return False
        return True

    async def close(self) -> None:
        """Close; what was sent still goes out for `linger_ms`."""
        if not self._closed:
            self._closed = True
            self._socket.stop()
            try:
                await self._keeper.close()
            finally:
                self._socket.close()
                await self._context.leave()
