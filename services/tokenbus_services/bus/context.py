"""A transport's ZeroMQ context, shared by all of its sockets."""

import asyncio
import time
from collections.abc import Callable

import zmq

from tokenbus_services.bus.guard import Guard
from tokenbus_services.bus.zap import Authenticator
from tokenbus_services.settings import BusSettings


class SharedContext:
    """A ZeroMQ context that lasts while a socket of it is open; close a socket, then call `leave`."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Take the clock of the listening sockets' guard, in seconds."""
        self._now = now
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._authenticator: Authenticator | None = None
        self._guard: Guard | None = None
        self._open = 0

    @property
    def is_open(self) -> bool:
        """Whether a socket is open."""
        return self._context is not None

    def socket(self, kind: int) -> "zmq.Socket[bytes]":
        """Return a new socket."""
        if self._context is None:
            self._context = zmq.Context()
        socket = self._context.socket(kind)
        self._open += 1
        return socket

    def authenticator(self) -> Authenticator:
        """Return the authenticator of all handshakes; a socket must be open."""
        if self._context is None:
            raise RuntimeError("an authenticator needs an open socket")
        if self._authenticator is None:
            self._authenticator = Authenticator(self._context)
        return self._authenticator

    def guard(self, settings: BusSettings) -> Guard:
        """Return the guard of the connections to all listening sockets; a socket must be open."""
        if self._guard is None:
            self._guard = Guard(settings, self._now)
        return self._guard

    async def leave(self) -> None:
        """End the context with its last socket; that waits until what was sent is out, at most for the linger."""
        self._open -= 1
        if self._open or self._context is None:
            return
        context, authenticator, guard = self._context, self._authenticator, self._guard
        self._context = self._authenticator = self._guard = None
        try:
            if authenticator is not None:
                await authenticator.close()
            if guard is not None:
                await guard.close()
        finally:
            await asyncio.to_thread(context.term)
