"""LoopSocket: a ZeroMQ socket on an event loop.

zmq.asyncio creates a future for each message, and may miss an arrival after a send that does not wait. libzmq's
descriptor is edge-triggered, and any call on the socket consumes the edge. Therefore LoopSocket waits only after a
receive that found no message, and checks for messages after each send.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import zmq

from tokenbus.bus.errors import ClosedError
from tokenbus.bus.transport import ReceiveBudget

# These flags are plain numbers, because combining enum members costs as much time as a send.
_NOW = int(zmq.NOBLOCK)
_NOW_WITH_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_MORE, _EVENTS, _READABLE = int(zmq.RCVMORE), int(zmq.EVENTS), int(zmq.POLLIN)


class LoopSocket:
    """A socket on one event loop: sending never waits, and receiving waits for a message."""

    def __init__(self, socket: "zmq.Socket[bytes]", name: str) -> None:
        self._socket = socket
        # Calling pyzmq's Python wrappers would double the cost of each call.
        bare: Any = super(zmq.Socket, socket)
        self._send, self._recv, self._get = bare.send, bare.recv, bare.get
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._readable = asyncio.Event()
        self._check_is_due = False
        self.budget = ReceiveBudget()
        self._closed = False
        self._descriptor = socket.fileno()
        self._loop.add_reader(self._descriptor, self._check)

    async def receive(self) -> list[bytes]:
        """Return the parts of the next message; cancelling this coroutine loses no message."""
        await self.budget.next()
        while (parts := self.receive_now()) is None:
            await self.wait()
        self.budget.count(parts)
        return parts

    async def receive_from(self) -> tuple[zmq.Frame, list[bytes]]:
        """Return the next message of a ROUTER socket: a frame with the peer's id and properties, and the parts."""
        await self.budget.next()
        while not self._has_message():
            self.budget.before_pause()
            await self.wait()
        peer: zmq.Frame = self._recv(_NOW, copy=False)
        parts = self._receive_parts()
        self.budget.count(parts)
        return peer, parts

    def is_read_out(self) -> bool:
        """Return whether every message that has arrived was received."""
        self._check()
        return not self._readable.is_set()

    async def wait(self) -> None:
        """Wait until a message may have arrived or the socket is closed; call this after a receive found nothing."""
        await self._readable.wait()

    def receive_now(self) -> list[bytes] | None:
        return self._receive_parts() if self._has_message() else None

    def _has_message(self) -> bool:
        self.check_open()
        has_message = bool(int(self._get(_EVENTS)) & _READABLE)
        if not has_message:
            self._readable.clear()
        return has_message

    def _receive_parts(self) -> list[bytes]:
        parts: list[bytes] = [self._recv(_NOW)]
        while self._get(_MORE):
            parts.append(self._recv(_NOW))
        return parts

    def send(self, parts: Sequence[bytes]) -> None:
        """Send a message; if libzmq rejects the first part, raise the error and send nothing."""
        self.check_open()
        self._check_soon()  # even a send that fails may have consumed the descriptor's edge
        send = self._send
        if len(parts) == 1:
            send(parts[0], _NOW)
        else:
            send(parts[0], _NOW_WITH_MORE)
            # Sending a later part fails only if the connection ends. The remaining parts must be sent even then.
            # If they are not sent, libzmq appends the next message to this unfinished message.
            last = len(parts) - 1
            for index in range(1, last + 1):
                try:  # noqa: SIM105 - a context manager would add half the cost of a send to each part
                    send(parts[index], _NOW_WITH_MORE if index < last else _NOW)
                except zmq.Again:
                    pass

    def connect_anew(self, address: str) -> None:
        """Reconnect after removing the previous connection, so that the socket never has two connections."""
        self._check_soon()
        with contextlib.suppress(zmq.ZMQError):  # no previous connection exists
            self._socket.disconnect(address)
        self._socket.connect(address)

    def check_open(self) -> None:
        if self._closed:
            raise ClosedError(self._name)

    def stop(self) -> None:
        """Make all further calls raise ClosedError, and wake the waiting coroutines."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            self._readable.set()

    def close(self) -> None:
        """Stop and close the socket, which still sends its queued messages within its linger time."""
        self.stop()
        self._socket.close()

    def _check_soon(self) -> None:
        if not self._check_is_due and not self._readable.is_set():
            self._check_is_due = True
            self._loop.call_soon(self._check)

    def _check(self) -> None:
        self._check_is_due = False
        if not self._closed and int(self._get(_EVENTS)) & _READABLE:
            self._readable.set()
