"""Acceptor: takes connections from a socket that listens, and begins them, by a TLS handshake where there is one."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from tokenbus_services.logs import DeduplicatedLog, logger

_log = logger("gateway")
_PAUSE_SECONDS = 0.1
_AT_ONCE = 64
"""Connections that are taken before other work goes on."""
BACKLOG = 4096


class Acceptor:
    """Passes on the connections that come to a socket; those that cannot be taken yet wait in the kernel's queue."""

    def __init__(self, listening: socket.socket, pass_on: Callable[[socket.socket], bool]) -> None:
        """Take a socket that does not block, and what takes a connection, or returns False: not now."""
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._pass_on = pass_on
        self._held: socket.socket | None = None
        """A connection that was not taken yet; no other is accepted before it."""
        self._is_accepting = False
        self._repeated_log = DeduplicatedLog()

    def start(self) -> None:
        """Begin to accept."""
        self._listening.listen(BACKLOG)
        self._is_accepting = True
        self.go_on()

    def go_on(self) -> None:
        """Try again now what was not taken before."""
        if self._is_accepting:
            self._loop.add_reader(self._listening, self._accept)

    def stop(self) -> None:
        """Accept nothing more: who connects from now on is refused at once."""
        self._is_accepting = False
        self._loop.remove_reader(self._listening)
        self._listening.close()
        if self._held is not None:
            self._held.close()
        self._repeated_log.close()

    def tick(self) -> None:
        """Let repeated lines of the log be written again; call it periodically."""
        self._repeated_log.expire()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection = self._held or self._listening.accept()[0]
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # too many open files, or no memory
                self._repeated_log.begin("accept", _log.error, "connections cannot be accepted", reason=str(error))
                self._pause()
                return
            self._held = None
            if not self._pass_on(connection):
                self._held = connection
                self._pause()
                return

    def _pause(self) -> None:
        """Accept nothing for a moment."""
        self._loop.remove_reader(self._listening)
        self._loop.call_later(_PAUSE_SECONDS, self.go_on)


class Beginnings:
    """Connections that begin; one whose TLS handshake is not over is known to nothing else."""

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext | None,
        seconds: float,
        has_room_beside: Callable[[int], bool],
    ) -> None:
        """Take what makes a connection's protocol, the TLS context, and the time of a handshake.

        `has_room_beside` tells whether one more may begin beside so many.
        """
        self._make = make
        self._context = context
        self._seconds = None if context is None else seconds
        self._has_room_beside = has_room_beside
        self._tasks: dict[asyncio.Task[None], socket.socket | None] = {}
        """Those whose handshake is not over, the oldest first; each with its connection until the handshake begins."""

    def __len__(self) -> int:
        """Return how many have not begun yet."""
        return len(self._tasks)

    def begin(self, connection: socket.socket) -> bool:
        """Begin one, or close it: there are too many that are past their handshake.

        The oldest handshakes make room: one that a client goes on with is over soon, and one that stalls is not.
        """
        # Without TLS it begins at once, and is refused in words.
        while self._context is not None and not self._has_room_beside(len(self._tasks)):
            if not self._tasks:
                connection.close()
                return True
            self._cut_off(next(iter(self._tasks)))
        task = asyncio.create_task(self._begin(connection))
        self._tasks[task] = connection
        task.add_done_callback(lambda ended: self._tasks.pop(ended, None))
        return True

    def _cut_off(self, task: "asyncio.Task[None]") -> None:
        """End a handshake; one that has not begun gives its file back at once, so that another one can be accepted."""
        connection = self._tasks.pop(task)
        task.cancel()
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Close those that have not begun."""
        for task in tuple(self._tasks):
            self._cut_off(task)

    async def _begin(self, connection: socket.socket) -> None:
        if (task := asyncio.current_task()) in self._tasks:
            self._tasks[task] = None
        connection.setblocking(False)  # noqa: FBT003 - a name of the standard library's
        with suppress(OSError):  # the client left, or TLS failed: nothing that a log needs
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make, connection, ssl=self._context, ssl_handshake_timeout=self._seconds
            )
