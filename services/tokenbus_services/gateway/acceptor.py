"""Acceptor: takes connections from the listening socket, which several processes may share, and begins them."""

import asyncio
import errno
import socket
from collections.abc import Callable, Collection
from contextlib import suppress

from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.tallies import Tally
from tokenbus_services.logs import logger

_log = logger("gateway")
_AT_ONCE = 4
"""Connections that one process takes before it looks again how many the others have."""
_TURN_SECONDS = 0.001
_FULL_SECONDS = 0.1
"""How long a process that has more connections than the others, or no room, leaves the next one to them."""
_RETRY_SECONDS = 0.1
BACKLOG = 4096


class Acceptor:
    """Accepts connections, and bounds those whose TLS handshake is not over.

    Processes that share the socket share the connections evenly: one that has more than the mean of the others lets
    them go first. One that stands still takes none, and delays the others by a millisecond at most.
    """

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[], asyncio.Protocol],
        connections: Collection[object],
        gateway: Gateway,
        tally: Tally,
    ) -> None:
        """Accept from `listening`, which must not block; `make` makes a protocol, which joins `connections`.

        `tally` counts the connections of all processes.
        """
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._make = make
        self._connections = connections
        self._settings = gateway.settings.gateway
        self._counts = gateway.counts
        self._tally = tally
        self._context = None if gateway.certificate is None else gateway.certificate.context
        self._is_accepting = False
        self._repeated_log = gateway.repeated_log
        self._beginning: dict[asyncio.Task[None], socket.socket | None] = {}
        """Connections that no protocol has yet, the oldest first; each with its socket until its handshake begins."""

    def __len__(self) -> int:
        """Return how many connections are open, or begin."""
        return len(self._connections) + len(self._beginning)

    def start(self) -> None:
        """Begin to accept."""
        self._listening.listen(BACKLOG)
        self._is_accepting = True
        self._loop.add_reader(self._listening, self._take_turn)

    def stop(self) -> None:
        """Accept nothing more, and close the connections whose handshake is not over."""
        if self._is_accepting:
            self._is_accepting = False
            self._loop.remove_reader(self._listening)
            self._listening.close()
        for task in tuple(self._beginning):
            self._cut_off(task)

    def tick(self) -> None:
        """Tell the other processes how many connections this one has; call it periodically."""
        self._tally.publish(len(self))

    def begin(self, connection: socket.socket) -> None:
        """Serve a connection; with TLS and without room, close the oldest whose handshake is not over, or this one.

        A handshake that its client goes on with is over soon; one that stalls makes room. Without TLS the protocol
        refuses a connection above the limit, with an error.
        """
        while self._context is not None and len(self) > self._settings.max_connections:
            self._counts.refused_connections += 1
            if not self._beginning:
                connection.close()
                return
            self._cut_off(next(iter(self._beginning)))
        task = asyncio.create_task(self._begin(connection))
        self._beginning[task] = connection
        task.add_done_callback(lambda ended: self._beginning.pop(ended, None))

    def _take_turn(self) -> None:
        own, others = len(self), self._tally.others
        if own * (self._settings.processes - 1) <= others:
            self._accept()
        else:
            self._pause(_TURN_SECONDS if own < self._settings.max_connections else _FULL_SECONDS)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                if error.errno == errno.EINVAL:  # the supervisor has closed it for all processes
                    self._loop.remove_reader(self._listening)
                    break
                # Too many open files, or no memory.
                self._repeated_log.begin("accept", _log.error, "connections cannot be accepted", reason=str(error))
                self._pause(_RETRY_SECONDS)
                break
            self.begin(connection)
        self._tally.publish(len(self))

    def _pause(self, seconds: float) -> None:
        """Accept nothing for a moment, then what the other processes have left."""
        self._loop.remove_reader(self._listening)
        self._loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        if self._is_accepting:
            self._loop.add_reader(self._listening, self._take_turn)
            self._accept()

    def _cut_off(self, task: "asyncio.Task[None]") -> None:
        """End a handshake; one that has not begun gives its file back at once, so that another can be accepted."""
        connection = self._beginning.pop(task)
        task.cancel()
        if connection is not None:
            connection.close()

    async def _begin(self, connection: socket.socket) -> None:
        if (task := asyncio.current_task()) in self._beginning:
            self._beginning[task] = None
        connection.setblocking(False)  # noqa: FBT003 - a name of the standard library's
        seconds = self._settings.request_timeout_ms / 1000 if self._context else None
        with suppress(OSError):  # the client left, or TLS failed: nothing that a log needs
            await self._loop.connect_accepted_socket(
                self._make, connection, ssl=self._context, ssl_handshake_timeout=seconds
            )
