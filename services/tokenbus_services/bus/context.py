"""A transport's ZeroMQ context: it lasts while one of its sockets is open."""

import asyncio
import time
from collections.abc import Callable

import zmq

from tokenbus_services.bus.gate import Gate
from tokenbus_services.bus.guard import Guard
from tokenbus_services.settings import BusSettings


class SharedContext:
    """Opens sockets; each is closed by its owner, who then leaves."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Take the time in seconds, by which the guard of the listening sockets goes."""
        self._now = now
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._gate: Gate | None = None
        self._guard: Guard | None = None
        self._open = 0

    @property
    def is_open(self) -> bool:
        """Whether anything is held."""
        return self._context is not None

    def socket(self, kind: int) -> "zmq.Socket[bytes]":
        """Return a new socket."""
        if self._context is None:
            self._context = zmq.Context()
        socket = self._context.socket(kind)
        self._open += 1
        return socket

    def gate(self) -> Gate:
        """Return the gate that all handshakes pass; call this with a socket open."""
        if self._context is None:
            raise RuntimeError("a gate was asked for with no socket open")
        if self._gate is None:
            self._gate = Gate(self._context)
        return self._gate

    def guard(self, settings: BusSettings) -> Guard:
        """Return what bounds the connections to all listening sockets; call this with a socket open."""
        if self._guard is None:
            self._guard = Guard(settings, self._now)
        return self._guard

    async def leave(self) -> None:
        """End the context with its last socket; that waits, at most for the linger, until what was sent is out."""
        self._open -= 1
        if self._open or self._context is None:
            return
        context, gate, guard = self._context, self._gate, self._guard
        self._context = self._gate = self._guard = None
        try:
            if gate is not None:
                await gate.close()
            if guard is not None:
                await guard.close()
        finally:
            await asyncio.to_thread(context.term)
