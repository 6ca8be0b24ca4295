"""What the tests of transports share: one transport with fresh addresses, closed at the end."""

import asyncio
import secrets
import socket
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeVar

from tests.support.waiting import soon, until
from tokenbus.bus import Connection, Listener, Outcome, Transport, ZeroMQTransport
from tokenbus.bus.memory import MemoryTransport
from tokenbus.settings import BusSettings

MAX_PART_BYTES = 300_000
SETTINGS = BusSettings(reconnect_ms=1, reconnect_max_ms=20, max_part_bytes=MAX_PART_BYTES)

T = TypeVar("T")


class Bus:
    def __init__(self, kind: str, folder: Path, settings: BusSettings = SETTINGS) -> None:
        self.kind = kind
        self.settings = settings
        self.transport = self.make(settings)
        self._folder = folder
        self._cleanup = AsyncExitStack()
        self._addresses = 0

    def make(self, settings: BusSettings) -> Transport:
        """Return a transport; a subclass for another transport returns its own."""
        return MemoryTransport(settings) if self.kind == "memory" else ZeroMQTransport(settings)

    def with_settings(self, settings: BusSettings) -> "Bus":
        other = type(self)(self.kind, self._folder, settings)
        self._cleanup.push_async_callback(other.close)
        return other

    def address(self) -> str:
        self._addresses += 1
        if self.kind == "memory":
            return f"memory://bus-{self._addresses}"
        if self.kind == "zeromq-ipc":
            return f"ipc://{self._folder}/{id(self)}-{self._addresses}"
        # A port that is bound without listening is given only to a process that asks for its number.
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        self._cleanup.callback(reserved.close)
        return f"tcp://127.0.0.1:{reserved.getsockname()[1]}"

    async def listen(self, address: str | None = None, refused: Callable[[str], None] | None = None) -> Listener:
        """Listen; any peer that is refused fails the test, unless it says otherwise."""
        listener = await soon(self.transport.listen(address or self.address(), refused or _fail))
        self._cleanup.push_async_callback(listener.close)
        return listener

    async def connect(self, address: str, lost: Callable[[], None] = lambda: None) -> Connection:
        connection = await soon(self.transport.connect(address, lost=lost))
        self._cleanup.push_async_callback(connection.close)
        return connection

    async def pair(self) -> tuple[Listener, Connection, bytes]:
        listener = await self.listen()
        connection = await self.connect(listener.address)
        return listener, connection, await introduce(connection, listener)

    def spawn(self, coroutine: Coroutine[None, None, T]) -> asyncio.Task[T]:
        """Run a coroutine beside the test; it ends with it."""
        task = asyncio.create_task(coroutine)
        self._cleanup.callback(task.cancel)
        return task

    async def close(self) -> None:
        await soon(self._cleanup.aclose())


async def introduce(connection: Connection, listener: Listener) -> bytes:
    assert connection.send([b"hello"])
    peer, parts = await soon(listener.receive())
    assert parts == [b"hello"]
    listener.admit(peer)
    return peer


async def both_ways(
    listener: Listener, connection: Connection, peer: bytes, up: list[bytes], down: list[bytes] | None = None
) -> None:
    """Send a message from the connection, and one back: by default the same."""
    assert connection.send(up)
    assert await soon(listener.receive()) == (peer, up)
    assert listener.send(peer, down or up) is Outcome.SENT
    assert await soon(connection.receive()) == (down or up)


async def meet_again(connection: Connection, listener: Listener) -> tuple[bytes, list[list[bytes]]]:
    """Return the id that a connection has at a new listener, and what it had sent before and was not lost.

    Until the connection notices that its old listener is gone, what it sends is lost; so it sends until it is heard.
    Each call sends words of its own: those of one before may still come.
    """
    probe, met = ([_PROBE + secrets.token_bytes(8)] for _ in range(2))
    seen: list[list[bytes]] = []

    async def peer_of(word: list[bytes]) -> bytes:
        while True:
            peer, parts = await listener.receive()
            if parts == word:
                return peer
            if not parts[0].startswith(_PROBE):
                seen.append(parts)

    hearing = asyncio.ensure_future(peer_of(probe))
    try:
        await until(lambda: hearing.done() or (connection.send(probe) and False))
        peer = await hearing
        listener.admit(peer)
    finally:
        hearing.cancel()
    await until(lambda: connection.send(met))
    assert await soon(peer_of(met)) == peer
    return peer, seen


_PROBE = b"probe"


def _fail(reason: str) -> None:
    # The loop's handler of exceptions would hide this from the test; its own exception handler is set to fail.
    raise AssertionError(reason)
