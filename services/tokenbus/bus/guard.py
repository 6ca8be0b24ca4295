"""Guard: limits the number, the silence and the memory of all connections to listening sockets.

The guard has its own thread, because a busy event loop would react too late to a peer that sends a gigabyte a second.
"""

import asyncio
import contextlib
import os
import resource
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tokenbus.bus.accepted import AcceptedConnection
from tokenbus.bus.transport import Usage
from tokenbus.logs import logger
from tokenbus.settings import BusSettings

if TYPE_CHECKING:
    from tokenbus.bus.monitor import Monitor

_log = logger("bus")
BOUNDS = ("bytes", "connections", "silent", "id", "key", "accept")
_CHECK_SECONDS = 0.02
_QUICK_SECONDS = 0.005
_FULL_SECONDS = 0.25
_MAX_SHARE = 0.05
"""Maximum fraction of time for checking all connections, because such a check blocks all other Python code."""
_GROWTH = 8_388_608
"""Growth of the process, in bytes, after which all connections are checked."""
_FAREWELL_SECONDS = 0.1  # time for a peer to read the reason before it is disconnected
_OTHER_FILES = 64
_FREED = 8


class Guard:
    """Cuts off connections that exceed a limit; callers must hold `lock` while they use a connection."""

    def __init__(self, settings: BusSettings, now: Callable[[], float] = time.monotonic) -> None:
        """Start the thread; a low limit on open files reduces the maximum number of connections."""
        self.lock = threading.RLock()
        self.cut_off: Counter[str] = Counter(dict.fromkeys(BOUNDS, 0))
        self.held_bytes = 0
        self._settings = settings
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._watched: list[Monitor] = []
        self._poll = select.poll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wake, select.POLLIN)
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._page = resource.getpagesize()
        self._spare: int | None = None
        self._open_spare()
        self._seen = self._resident()
        self._pause = _CHECK_SECONDS
        self._next_full = 0.0
        self.max_connections = _room(settings.max_connections)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tokenbus-guard", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        self._closed = True
        os.eventfd_write(self._wake, 1)
        await asyncio.to_thread(self._thread.join)
        for descriptor in (self._wake, self._statm, self._spare):
            if descriptor is not None:
                os.close(descriptor)

    def watch(self, watched: "Monitor") -> None:
        with self.lock:
            self._watched.append(watched)
            self._poll.register(watched.descriptor, select.POLLIN)
        os.eventfd_write(self._wake, 1)

    def release(self, watched: "Monitor") -> None:
        with self.lock:
            self._watched.remove(watched)
            self._poll.unregister(watched.descriptor)

    def usage(self) -> Usage:
        """Return the use of each limit; any thread may call this."""
        with self.lock:
            admitted = [each.is_admitted for watched in self._watched for each in watched.connections.values()]
            silent = len(admitted) - sum(admitted)
            return Usage(sum(admitted), silent, self.held_bytes, dict(self.cut_off))

    def accept(self, descriptor: int, local_address: object, handshakes: int) -> AcceptedConnection:
        """Start to observe an accepted connection; raises OSError if the connection has ended already."""
        os.eventfd_write(self._wake, 1)  # without connections, the guard's thread sleeps without a timeout
        return AcceptedConnection(descriptor, local_address, handshakes, self._now())

    def make_room(self, at_least: int = 0) -> None:
        """Evict surplus connections: those already dismissed come first, followed by the oldest unadmitted ones.

        If new connections were refused, silent peers would block all other peers.
        """
        if not at_least and sum(len(each.connections) for each in self._watched) <= self.max_connections:
            return
        live = self._live()
        surplus = max(len(live) - self.max_connections, at_least)
        may_go = [each for each in live if each.cut_at is not None or not each.is_admitted]
        may_go.sort(key=lambda each: (each.cut_at is None, each.accepted))
        reason = f"at most {self.max_connections} connections at once, and this peer has not introduced itself"
        for connection in may_go[: max(0, surplus)]:
            if connection.cut_at is None:
                self.cut(connection, "connections", reason)
            else:
                connection.shut_down()

    def _live(self) -> list[AcceptedConnection]:
        return [each for watched in self._watched for each in watched.connections.values() if not each.is_cut]

    def free_descriptors(self, listening: socket.socket) -> None:
        """Evict connections when no file descriptor is left, and refuse the connections that wait in the backlog.

        Without this call, libzmq would retry `accept` in a busy loop.
        """
        self.cut_off["accept"] += 1
        self.make_room(_FREED)
        if self._spare is None:
            return
        os.close(self._spare)
        self._spare = None
        with contextlib.suppress(OSError):
            while True:
                listening.accept()[0].close()
        self._open_spare()

    def _open_spare(self) -> None:
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def cut(self, connection: AcceptedConnection, kind: str, reason: str) -> None:
        if not connection.is_cut:
            self.cut_off[kind] += 1
            connection.report(connection, f"cut off: {reason}")
            connection.shut_down(reset=True)

    def dismiss(self, connection: AcceptedConnection) -> None:
        """Cut off a connection after a delay that lets its peer read the last messages."""
        connection.cut_at = self._now() + _FAREWELL_SECONDS

    def _run(self) -> None:
        while not self._closed:
            busy = any(watched.connections for watched in self._watched)
            self._poll.poll(self._pause * 1000 if busy else None)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            try:
                with self.lock:
                    for watched in tuple(self._watched):
                        watched.catch_up()
                    self._check()
            except Exception:  # noqa: BLE001 - without this thread nothing is bounded
                _log.exception("checking connections failed")
                time.sleep(_CHECK_SECONDS)

    def _check(self) -> None:
        now, resident = self._now(), self._resident()
        is_growing = resident - self._seen >= _GROWTH
        self._pause = _QUICK_SECONDS if is_growing else _CHECK_SECONDS
        if not is_growing and now < self._next_full:
            self._seen = min(self._seen, resident)
            return
        began, self._seen = time.monotonic(), resident
        live = self._live()
        for connection in live:
            if connection.cut_at is not None and now >= connection.cut_at:
                connection.shut_down()
                continue
            with contextlib.suppress(OSError):  # the connection has ended already
                connection.measure(now, resident)
            self._check_size(connection)
            self._check_introduction(connection, now)
        self._check_growth(live, now, resident)
        self._check_sum(live, now)
        self._next_full = now + max(_FULL_SECONDS, (time.monotonic() - began) / _MAX_SHARE)

    def _check_size(self, connection: AcceptedConnection) -> None:
        settings = self._settings
        most = settings.max_pending_bytes if connection.is_admitted else settings.max_unadmitted_bytes
        if connection.held > most:
            reason = f"{connection.held} bytes that are unfinished or unread, more than {most}"
            self.cut(connection, "bytes", reason)

    def _check_growth(self, live: list[AcceptedConnection], now: float, resident: int) -> None:
        """Cut off the peers that made the process grow too much: all unadmitted peers, and the worst admitted peer."""
        settings, admitted = self._settings, []
        for connection in live:
            if connection.is_admitted and connection.grown > settings.max_pending_bytes:
                admitted.append(connection)
            elif not connection.is_admitted and connection.grown > settings.max_unadmitted_bytes:
                self._cut_grown(connection, settings.max_unadmitted_bytes)
        if admitted:
            worst = max(admitted, key=lambda each: (each.held, now - each.moved))
            self._cut_grown(worst, settings.max_pending_bytes)
            for each in admitted:
                if each is not worst:
                    each.grown_from = resident  # the growth until now is charged to the worst connection

    def _cut_grown(self, connection: AcceptedConnection, most: int) -> None:
        reason = f"an unfinished message, for which this process grew by {connection.grown} bytes, more than {most}"
        # An admitted peer or a Unix socket may have complete messages that the event loop has not read yet.
        cut = self.cut if connection.is_tcp and not connection.is_admitted else self._cut_if_read_out
        cut(connection, "bytes", reason)

    def _check_introduction(self, connection: AcceptedConnection, now: float) -> None:
        most = self._settings.introduction_timeout_ms
        if not connection.is_admitted and now - connection.accepted > most / 1000:
            # The event loop may not have read the hello yet, and unread bytes of a Unix socket are not counted.
            cut = self.cut if connection.is_tcp and not connection.held else self._cut_if_read_out
            cut(connection, "silent", f"it has not introduced itself within {most} ms")

    def _check_sum(self, live: list[AcceptedConnection], now: float) -> None:
        """Cut off the connections with the most pending bytes, until the sum of the others is within the limit.

        The time without progress only breaks ties, because a flooding peer can always make progress.
        """
        self.held_bytes = sum(each.held for each in live)
        unadmitted = [each for each in live if not each.is_admitted]
        settings = self._settings
        for some, most in ((unadmitted, settings.max_unadmitted_bytes), (live, settings.max_total_pending_bytes)):
            left = sorted((each for each in some if not each.is_cut), key=lambda each: (each.held, now - each.moved))
            held = sum(each.held for each in left)
            while held > most and left:
                connection = left.pop()
                reason = f"it holds {connection.held} of {held} bytes that are unfinished or unread"
                self.cut(connection, "bytes", f"{reason}, together more than {most}")
                held -= connection.held

    def _cut_if_read_out(self, connection: AcceptedConnection, kind: str, reason: str) -> None:
        """Cut a connection off, unless the busy event loop still has messages of that connection to read."""
        if connection.is_suspect:
            return
        connection.is_suspect = True
        delivered, was_admitted = connection.delivered, connection.is_admitted

        def decide() -> None:
            with self.lock:
                connection.is_suspect = False
                is_same = connection.delivered == delivered or kind == "silent"
                if is_same and connection.is_admitted == was_admitted and connection.is_read_out():
                    self.cut(connection, kind, reason)

        with contextlib.suppress(RuntimeError):  # the event loop has closed
            self._loop.call_soon_threadsafe(decide)

    def _resident(self) -> int:
        return int(os.pread(self._statm, 128, 0).split()[1]) * self._page


def _room(wanted: int) -> int:
    """Return the possible number of connections, at most `wanted`; each connection needs two file descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    room = max(2, (soft - _OTHER_FILES - sum(1 for _ in Path("/proc/self/fd").iterdir())) // 2)
    if room < wanted:
        _log.warning("fewer connections than the bus allows", room=room, wanted=wanted, open_files=soft)
    return min(room, wanted)
