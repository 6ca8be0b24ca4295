"""The transport over ZeroMQ: a ROUTER listens, DEALERs connect, over TCP or Unix sockets."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from types import MappingProxyType

import zmq

from tokenbus_services.bus.addresses import TcpEndpoint, parse_remote
from tokenbus_services.bus.binding import Binding, bind
from tokenbus_services.bus.errors import AddressError
from tokenbus_services.bus.monitor import Monitor
from tokenbus_services.bus.sockets import LoopSocket
from tokenbus_services.bus.transport import Outcome, Parts, check_message, ignore
from tokenbus_services.settings import BusSettings

_Leave = Callable[[], Coroutine[None, None, None]]
_UNBIND_SECONDS = 1.0  # libzmq's thread takes milliseconds, unless the machine stands still


class ZeroMQTransport:
    """Listens and connects at `tcp://HOST:PORT` and `ipc://PATH`; holds nothing while no socket of its own is open."""

    def __init__(self, settings: BusSettings) -> None:
        """Take the bounds and times from the settings."""
        self._settings = settings
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._open = 0

    async def listen(self, address: str, refused: Callable[[str], None] = ignore) -> "ZeroMQListener":
        """Listen at an address, or raise an AddressError; refused hears of whom libzmq turns away or cuts off."""
        binding = await bind(address)
        socket = self._socket(zmq.ROUTER)
        monitor = None
        try:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.IPV6, int("[" in binding.address))
            socket.setsockopt(zmq.USE_FD, binding.descriptor)
            monitor = Monitor(socket, binding.descriptor, self._settings, refused)
            socket.bind(binding.address)
        except zmq.ZMQError as error:
            if monitor is not None:
                await monitor.close()
            socket.close(linger=0)
            binding.release()
            await self._leave()
            raise AddressError(address, (error.strerror or str(error)).lower()) from None
        binding.hand_over()
        return ZeroMQListener(socket, binding, monitor, self._settings, self._leave)

    async def connect(self, address: str) -> "ZeroMQConnection":
        """Connect to an address, whether or not somebody listens there yet, or raise an AddressError."""
        endpoint = parse_remote(address)
        socket = self._socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.IPV6, int(isinstance(endpoint, TcpEndpoint) and endpoint.is_v6))
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            await self._leave()
            raise AddressError(address, (error.strerror or str(error)).lower()) from None
        return ZeroMQConnection(socket, address, self._settings, self._leave)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        if self._context is None:
            self._context = zmq.Context()
        socket = self._context.socket(kind)
        self._open += 1
        for option, value in _options(self._settings).items():
            socket.setsockopt(option, value)
        return socket

    async def _leave(self) -> None:
        """End the context with its last socket; that waits, at most for the linger, until what was sent is out."""
        self._open -= 1
        if not self._open and self._context is not None:
            context, self._context = self._context, None
            await asyncio.to_thread(context.term)


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
            zmq.ZAP_DOMAIN: b"tokenbus",
        }
    )


class ZeroMQListener:
    """A ROUTER; a peer's id is the one that libzmq gives its connection."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        binding: Binding,
        monitor: Monitor,
        settings: BusSettings,
        leave: _Leave,
    ) -> None:
        """Take a socket that is bound and watched."""
        self.address = binding.address
        self._zmq = socket
        self._socket = LoopSocket(socket, f"listener at {binding.address}")
        self._binding = binding
        self._monitor = monitor
        self._max_part_bytes = settings.max_part_bytes
        self._leave = leave
        self._closed = False

    async def receive(self) -> tuple[bytes, list[bytes]]:
        """Return the next message and its peer; busy peers take turns."""
        peer, *parts = await self._socket.receive()
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

    async def close(self) -> None:
        """Close; what was sent still goes out for `linger_ms`, and the address is free on return."""
        if self._closed:
            return
        self._closed = True
        self._socket.stop()
        self._monitor.silence()
        try:
            self._zmq.unbind(self._zmq.getsockopt_string(zmq.LAST_ENDPOINT))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_UNBIND_SECONDS):
                    await self._monitor.unbound.wait()
        finally:
            await self._monitor.close()
            self._socket.close()
            self._binding.release()
            await self._leave()


class ZeroMQConnection:
    """A DEALER."""

    def __init__(self, socket: "zmq.Socket[bytes]", address: str, settings: BusSettings, leave: _Leave) -> None:
        """Take a socket that is connected, or will be."""
        self._socket = LoopSocket(socket, f"connection to {address}")
        self._max_part_bytes = settings.max_part_bytes
        self._leave = leave
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
            self._socket.close()
            await self._leave()
