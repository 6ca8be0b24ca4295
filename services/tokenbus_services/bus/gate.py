"""What every ZeroMQ handshake of a context waits for.

libzmq asks whoever is bound to a well-known name whether a peer may come in (ZeroMQ RFC 27), and waits for the answer.
Everybody may, but not before the monitors have looked at their connection: or a peer that is cut off right after its
handshake would be gone before anything could be told of it.
"""

import asyncio
import contextlib
from typing import Protocol

import zmq

from tokenbus_services.bus.errors import ClosedError
from tokenbus_services.bus.sockets import LoopSocket

HANDSHAKE = "Handshake"
"""What a message's frames say of the handshake of its connection: the how-many-th that was answered."""
_NAME = "inproc://zeromq.zap.01"


class Watcher(Protocol):
    """Who wants to see connections before they are used."""

    def catch_up(self) -> None:
        """Look at all connections there are."""


class Gate:
    """Lets everybody in, after all watchers have looked."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """Begin to answer."""
        self.watchers: list[Watcher] = []
        self.handshakes = 0
        """How many have been answered."""
        socket = context.socket(zmq.REP)
        socket.linger = 0
        socket.bind(_NAME)
        self._socket = LoopSocket(socket, "gate")
        self._task = asyncio.create_task(self._answer())

    async def close(self) -> None:
        """Answer no more."""
        self._socket.close()
        await self._task

    async def _answer(self) -> None:
        with contextlib.suppress(ClosedError):
            while True:
                version, request_id, *_ = await self._socket.receive()
                for watcher in self.watchers:
                    watcher.catch_up()
                self.handshakes += 1
                with contextlib.suppress(zmq.ZMQError):  # who asked has left
                    self._socket.send([version, request_id, b"200", b"OK", b"", _properties(self.handshakes)])


def _properties(handshake: int) -> bytes:
    """Return what every frame of a connection says, as ZMTP's properties are written."""
    name, value = HANDSHAKE.encode(), b"%d" % handshake
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
