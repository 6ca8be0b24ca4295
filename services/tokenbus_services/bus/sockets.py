"""A ZeroMQ socket on an event loop.

Not zmq.asyncio: it makes a future for each message, and a send that does not wait, on the same socket, can hide from it
that something arrived. libzmq's descriptor says once that something happened, and any call on the socket consumes that.
So here every wait begins after a receive that found nothing, and every send has the socket looked at again.
"""

import asyncio
import contextlib
from collections.abc import Sequence

import zmq

from tokenbus_services.bus.errors import ClosedError
from tokenbus_services.bus.transport import AdmissionLimiter


class LoopSocket:
    """Sends without waiting, and receives with waiting, on the loop that it was made on."""

    def __init__(self, socket: "zmq.Socket[bytes]", name: str) -> None:
        """Take a socket that nothing else uses from now on; the name is for errors."""
        self._socket = socket
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._readable = asyncio.Event()
        self._look_is_due = False
        self._limiter = AdmissionLimiter()
        self._closed = False
        self._descriptor = socket.fileno()
        self._loop.add_reader(self._descriptor, self._look)

    async def receive(self) -> list[bytes]:
        """Return the next message's parts; nothing is lost by cancelling this."""
        await self._limiter.next()
        while (parts := self.receive_now()) is None:
            await self.wait()
        self._limiter.took(parts)
        return parts

    async def receive_from(self) -> tuple[zmq.Frame, list[bytes]]:
        """Return the next message of a ROUTER: whose it is, as a frame with what the transport knows, and its parts."""
        await self._limiter.next()
        while True:
            self.check_open()
            try:
                peer, parts = self._socket.recv(zmq.NOBLOCK, copy=False), self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._readable.clear()
                await self.wait()
            else:
                self._limiter.took(parts)
                return peer, parts

    def is_read_out(self) -> bool:
        """Tell whether every message that has arrived was received, and another receive has found none."""
        self._look()
        return not self._readable.is_set()

    async def wait(self) -> None:
        """Wait, after a receive that found nothing, until there may be something, or all is closed."""
        await self._readable.wait()

    def receive_now(self) -> list[bytes] | None:
        """Return the next message's parts, or None."""
        self.check_open()
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            self._readable.clear()
            return None

    def send(self, parts: Sequence[bytes]) -> None:
        """Send a message, or raise what libzmq says of its first part and send nothing."""
        self.check_open()
        self._look_soon()  # even a send that fails may have consumed what the descriptor had to say
        send = self._socket.send
        if len(parts) == 1:
            send(parts[0], zmq.NOBLOCK)
        else:
            send(parts[0], zmq.NOBLOCK | zmq.SNDMORE)
            # Room is found for a message, not for a part: one that fails now fails with its connection, and the others
            # must still be given, or libzmq would take the next message for their rest.
            with contextlib.suppress(zmq.Again):
                for part in parts[1:-1]:
                    with contextlib.suppress(zmq.Again):
                        send(part, zmq.NOBLOCK | zmq.SNDMORE)
                send(parts[-1], zmq.NOBLOCK)

    def connect_anew(self, address: str) -> None:
        """Connect again, after taking away what is left of an earlier connection: never two at once."""
        self._look_soon()
        with contextlib.suppress(zmq.ZMQError):  # nothing is left
            self._socket.disconnect(address)
        self._socket.connect(address)

    def check_open(self) -> None:
        """Raise a ClosedError after `stop`."""
        if self._closed:
            raise ClosedError(self._name)

    def stop(self) -> None:
        """Take part in nothing any more; whoever waits is told."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            self._readable.set()

    def close(self) -> None:
        """Stop, and give the socket back; what was sent still goes out for its linger."""
        self.stop()
        self._socket.close()

    def _look_soon(self) -> None:
        if not self._look_is_due and not self._readable.is_set():
            self._look_is_due = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._look_is_due = False
        if not self._closed and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._readable.set()
