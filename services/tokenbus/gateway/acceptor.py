"""Acceptor: accepts connections, and bounds the number of unfinished TLS handshakes."""

import asyncio
import socket
from collections.abc import Callable, Collection
from contextlib import suppress

from tokenbus.gateway.gateway import Gateway
from tokenbus.logs import logger

_log = logger("gateway")
_AT_ONCE = 16
"""Maximum number of connections accepted in one callback. Refused connections stay open until the callback ends."""
_RETRY_SECONDS = 0.1
BACKLOG = 4096


class Acceptor:
    """Accepts the connections of one listening socket."""

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[], asyncio.Protocol],
        connections: Collection[object],
        gateway: Gateway,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._make = make
        self._connections = connections
        self._settings = gateway.settings.gateway
        self._counts = gateway.counts
        self._context = None if gateway.certificate is None else gateway.certificate.context
        self._is_accepting = False
        self._repeated_log = gateway.repeated_log
        self._beginning: dict[asyncio.Task[None], socket.socket | None] = {}
        """Maps tasks of unfinished handshakes, oldest first, to the socket, or to None once the handshake begins."""

    def __len__(self) -> int:
        return len(self._connections) + len(self._beginning)

    def start(self) -> None:
        self._listening.listen(BACKLOG)
        self._is_accepting = True
        self._loop.add_reader(self._listening, self._accept)

    def stop_listening(self) -> None:
        """Accept the waiting connections and close the listening socket, so that the kernel refuses new connections."""
        if self._is_accepting:
            self._accept(BACKLOG)
            self._is_accepting = False
            self._loop.remove_reader(self._listening)
            self._listening.close()

    def stop(self) -> None:
        """Stop accepting, and close the connections that are in their handshake."""
        self.stop_listening()
        for task in tuple(self._beginning):
            self._cut_off(task)

    def begin(self, connection: socket.socket) -> None:
        """Serve a connection.

        With TLS, a connection above the limit closes the oldest unfinished handshake, which is probably stalled. If all
        handshakes are finished, this connection is closed. Without TLS, connections above the limit get an HTTP error.
        """
        while self._context is not None and len(self) > self._settings.most_connections:
            self._counts.refused_connections += 1
            if not self._beginning:
                connection.close()
                return
            self._cut_off(next(iter(self._beginning)))
        task = asyncio.create_task(self._begin(connection))
        self._beginning[task] = connection
        task.add_done_callback(lambda ended: self._beginning.pop(ended, None))

    def _accept(self, most: int = _AT_ONCE) -> None:
        for _ in range(most):
            try:
                connection, _address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # too many open files, or no memory
                self._repeated_log.begin("accept", _log.error, "connections cannot be accepted", reason=str(error))
                self._loop.remove_reader(self._listening)
                self._loop.call_later(_RETRY_SECONDS, self._go_on)
                return
            self.begin(connection)

    def _go_on(self) -> None:
        if self._is_accepting:
            self._loop.add_reader(self._listening, self._accept)

    def _cut_off(self, task: "asyncio.Task[None]") -> None:
        """Cancel a handshake. If the handshake has not begun, close the socket too."""
        connection = self._beginning.pop(task)
        task.cancel()
        if connection is not None:
            connection.close()

    async def _begin(self, connection: socket.socket) -> None:
        if (task := asyncio.current_task()) in self._beginning:
            self._beginning[task] = None
        connection.setblocking(False)  # noqa: FBT003 - a name of the standard library's
        seconds = self._settings.request_timeout_ms / 1000 if self._context else None
        with suppress(OSError):  # ignored: the client left, or TLS failed
            await self._loop.connect_accepted_socket(
                self._make, connection, ssl=self._context, ssl_handshake_timeout=seconds
            )
