"""Guard: the bounds on all connections to a context's listening sockets: their number, silence and memory.

It has a thread of its own, which a busy event loop does not delay: connections can send a gigabyte in a second.
"""

import asyncio
import contextlib
import ctypes
import os
import random
import resource
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from tokenbus_services.bus.accepted import AcceptedConnection
from tokenbus_services.bus.transport import Usage
from tokenbus_services.logs import logger
from tokenbus_services.settings import BusSettings

if TYPE_CHECKING:
    from tokenbus_services.bus.monitor import Monitor

_log = logger("bus")
BOUNDS = ("bytes", "memory", "connections", "silent", "id", "key", "accept")
_CHECK_SECONDS = 0.02
_QUICK_SECONDS = 0.005
_DOUBT_SECONDS = 0.001
_MOST_DOUBTFUL = 64
"""How many doubtful connections are looked at each time, drawn anew with each full check."""
_FULL_SECONDS = 0.25
_MOST_SHARE = 0.05
"""The most of the time that full checks of thousands of connections take, in which nothing else of Python runs."""
_GROWTH = 8_388_608
"""With less growth of the process between two checks, no connection is measured: what is held is resident."""
_FAREWELL_SECONDS = 0.1
"""How long a peer that its listener disconnects may still read the reason."""
_MUCH = 1_048_576
_STUCK, _STUCK_SECONDS = 65_536, 0.05
_TRIM_SECONDS = 0.1
"""How long libzmq may take to free what it held of a connection that was cut off."""
_OTHER_FILES = 64
_FREED = 8
_CROWD = 128
"""For so many peers that introduce themselves at once, each may take bus.introduction_timeout_ms."""


class Guard:
    """Cuts off connections that exceed a bound. Hold `lock` to use connections."""

    def __init__(self, settings: BusSettings, now: Callable[[], float] = time.monotonic) -> None:
        """Take the bounds and the time in seconds, and start the thread.

        The bound on connections is lowered to what this process's limit of open files allows.
        """
        self.lock = threading.RLock()
        self.cut_off: Counter[str] = Counter(dict.fromkeys(BOUNDS, 0))
        """Connections that were cut off, by the bound that they exceeded."""
        self.held_bytes = self.peak_held_bytes = 0
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
        self._seen = self._calm = self._resident()
        self._pause = _CHECK_SECONDS
        self._next_full = 0.0
        self._doubtful: list[AcceptedConnection] = []
        self._trim_at: float | None = None
        self.max_connections = _room(settings.max_connections)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tokenbus-guard", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Stop the thread."""
        self._closed = True
        os.eventfd_write(self._wake, 1)
        await asyncio.to_thread(self._thread.join)
        for descriptor in (self._wake, self._statm, self._spare):
            if descriptor is not None:
                os.close(descriptor)

    def watch(self, watched: "Monitor") -> None:
        """Bound a listening socket's connections."""
        with self.lock:
            self._watched.append(watched)
            self._poll.register(watched.descriptor, select.POLLIN)
        os.eventfd_write(self._wake, 1)

    def release(self, watched: "Monitor") -> None:
        """Stop bounding a listening socket's connections."""
        with self.lock:
            self._watched.remove(watched)
            self._poll.unregister(watched.descriptor)

    def usage(self) -> Usage:
        """Return how much of the bounds is in use; any thread may call this."""
        with self.lock:
            admitted = [each.is_admitted for watched in self._watched for each in watched.connections.values()]
            silent = len(admitted) - sum(admitted)
            return Usage(sum(admitted), silent, self.held_bytes, self.peak_held_bytes, dict(self.cut_off))

    # New connections.

    def accept(self, descriptor: int, listens_at: object, handshakes: int) -> AcceptedConnection | None:
        """Return a new connection, or None if it has ended already; from now on there is something to check."""
        os.eventfd_write(self._wake, 1)  # another thread may accept it just as this one's begins to sleep without end
        with contextlib.suppress(OSError):
            return AcceptedConnection(descriptor, listens_at, handshakes, self._now())
        if self._spare is None:
            return None
        # The spare descriptor is for this: without one a connection could not even be cut off.
        os.close(self._spare)
        self._spare = None
        try:
            return AcceptedConnection(descriptor, listens_at, handshakes, self._now())
        except OSError:  # it has just ended
            return None
        finally:
            self._open_spare()

    def make_room(self, at_least: int = 0) -> int:
        """Evict connections that have not introduced themselves, as far as there are too many in all.

        Those that leave go first, then those that have sent nothing, then the others; of both the oldest. A peer of
        ours speaks at once, so it keeps its place during a flood of silent connections, and where all speak, none is
        cut off before all places are taken. If the newest were refused, a peer of ours would have to wait for one of
        their places.
        """
        if not at_least and sum(len(each.connections) for each in self._watched) <= self.max_connections:
            return 0
        live = self._live()
        surplus = max(len(live) - self.max_connections, at_least)
        if surplus <= 0:
            return 0
        dismissed = [each for each in live if each.cut_at is not None][:surplus]
        for connection in dismissed:
            connection.shut_down()
        surplus -= len(dismissed)
        waiting = sorted((each for each in self._live() if not each.is_admitted), key=lambda each: each.accepted)
        evicted = list(islice((each for each in waiting if not each.has_spoken()), surplus))
        if len(evicted) < surplus:
            evicted += islice((each for each in waiting if each.has_spoken()), surplus - len(evicted))
        reason = f"at most {self.max_connections} connections at once, and it has not introduced itself"
        for connection in evicted:
            self.cut(connection, "connections", reason)
        return len(dismissed) + len(evicted)

    def _live(self) -> list[AcceptedConnection]:
        return [each for watched in self._watched for each in watched.connections.values() if not each.is_cut]

    def free_descriptors(self, listening: socket.socket) -> None:
        """Make room after no descriptor was left for a connection, or else refuse those that wait for one.

        libzmq would try to accept them again and again, without a pause.
        """
        self.cut_off["accept"] += 1
        if self.make_room(_FREED) or self._spare is None:
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

    # Cutting off.

    def cut(self, connection: AcceptedConnection, kind: str, reason: str) -> None:
        """Cut a connection off, and report why."""
        if not connection.is_cut:
            self.cut_off[kind] += 1
            connection.monitor.report(connection, f"cut off: {reason}")
            connection.shut_down(reset=True)
            if kind in {"bytes", "memory"} and self._trim_at is None:
                self._trim_at = self._now() + _TRIM_SECONDS

    def dismiss(self, connection: AcceptedConnection) -> None:
        """Cut a connection off soon, once what was sent to it is out."""
        connection.cut_at = self._now() + _FAREWELL_SECONDS

    # The thread.

    def _run(self) -> None:
        while not self._closed:
            busy = any(watched.connections for watched in self._watched)
            self._poll.poll(self._pause * 1000 if busy or self._trim_at is not None else None)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            try:
                with self.lock:
                    for watched in tuple(self._watched):
                        watched.catch_up()
                    self._check()
            except Exception:  # noqa: BLE001 - without this thread nothing is bounded, and handshakes wait for it
                _log.exception("checking connections failed")
                time.sleep(_CHECK_SECONDS)

    def _check(self) -> None:
        now, resident = self._now(), self._resident()
        self._pause = _QUICK_SECONDS if resident - self._seen >= _GROWTH else _CHECK_SECONDS
        if self._doubtful:
            self._pause = _DOUBT_SECONDS
        if self._trim_at is not None and now >= self._trim_at:
            self._trim_at = None
            _trim()
        if resident - self._seen < _GROWTH and now < self._next_full:
            self._seen = min(self._seen, resident)
            self._look_again(now, resident)
            return
        began, self._seen = time.monotonic(), resident
        live = self._live()
        patience = self._patience_with(live)
        for connection in live:
            if connection.cut_at is not None and now >= connection.cut_at:
                connection.shut_down()
                continue
            with contextlib.suppress(OSError):  # it has ended already
                connection.measure(now, resident)
            self._check_size(connection)
            self._check_introduction(connection, now, patience)
        doubtful = [each for each in live if each.is_doubtful(resident)]
        self._doubtful = random.sample(doubtful, min(len(doubtful), _MOST_DOUBTFUL))
        over_tcp = [each for each in live if each.is_tcp]
        self._check_sum(over_tcp, now)
        self._check_memory(over_tcp, now, resident)
        self._next_full = now + max(_FULL_SECONDS, (time.monotonic() - began) / _MOST_SHARE)

    def _look_again(self, now: float, resident: int) -> None:
        """Measure those that may hold much: a Unix socket's bytes are seen only in the moment before they are read."""
        for connection in self._doubtful:
            if not connection.is_cut and not connection.is_closed:
                connection.measure(now, resident)
                self._check_size(connection)

    def _check_size(self, connection: AcceptedConnection) -> None:
        settings = self._settings
        most = settings.max_pending_bytes if connection.is_admitted else settings.max_unadmitted_bytes
        if connection.held <= most:
            return
        reason = f"{connection.held} bytes that are unfinished or unread, more than {most}"
        cut = self.cut if connection.is_tcp else self._cut_if_read_out
        cut(connection, "bytes", reason)

    def _patience_with(self, live: list[AcceptedConnection]) -> int:
        """Return the milliseconds that a peer which has spoken may take: in a crowd all are slow, and we are.

        If each were cut off then and began anew, none would ever be admitted.
        """
        speaking = sum(not each.is_admitted and each.has_spoken() for each in live)
        return self._settings.introduction_timeout_ms * max(1, -(-speaking // _CROWD))

    def _check_introduction(self, connection: AcceptedConnection, now: float, patience: int) -> None:
        if connection.is_admitted:
            return
        most = patience if connection.has_spoken() else self._settings.introduction_timeout_ms
        if now - connection.accepted <= most / 1000:
            return
        # A Unix socket's peer may have sent what a busy event loop has yet to read.
        cut = self._cut_if_read_out if connection.has_spoken() or not connection.is_tcp else self.cut
        cut(connection, "silent", f"it has not introduced itself within {most} ms")

    def _check_sum(self, live: list[AcceptedConnection], now: float) -> None:
        """Cut off those that have held the most for the longest without finishing a message."""
        self.held_bytes = sum(each.held for each in live)
        self.peak_held_bytes = max(self.peak_held_bytes, self.held_bytes)
        unadmitted = [each for each in live if not each.is_admitted]
        settings = self._settings
        for some, most in ((unadmitted, settings.max_unadmitted_bytes), (live, settings.max_total_pending_bytes)):
            left = sorted((each for each in some if not each.is_cut), key=lambda each: each.held * (now - each.moved))
            held = sum(each.held for each in left)
            while held > most and left:
                connection = left.pop()
                reason = f"it holds {connection.held} of {held} bytes that are unfinished or unread"
                self.cut(connection, "bytes", f"{reason}, together more than {most}")
                held -= connection.held

    def _check_memory(self, live: list[AcceptedConnection], now: float, resident: int) -> None:
        """Cut off who may be the cause, when this process grows by far more than what has arrived.

        libzmq takes thirty times its bytes for a message of many tiny parts. Of those that have not introduced
        themselves all are cut off that are in the middle of a message; of the others the one that holds the most.
        """
        if self.held_bytes < _MUCH or resident < self._calm:
            self._calm = resident
            return
        grown, settings = resident - self._calm, self._settings
        stuck = [each for each in live if not each.is_cut and each.held > _STUCK and now - each.moved > _STUCK_SECONDS]
        unadmitted = [each for each in stuck if not each.is_admitted]
        if unadmitted and grown > settings.max_unadmitted_bytes:
            some, most = unadmitted, settings.max_unadmitted_bytes
        elif stuck and grown > settings.max_total_pending_bytes:
            some, most = [max(stuck, key=lambda each: each.held)], settings.max_total_pending_bytes
        else:
            return
        self._calm = resident
        for connection in some:
            reason = f"it holds {connection.held} bytes unfinished, for which this process grew by {grown}"
            self.cut(connection, "memory", f"{reason}, more than {most}")

    def _cut_if_read_out(self, connection: AcceptedConnection, kind: str, reason: str) -> None:
        """Cut a connection off, unless a busy event loop has yet to read what it has sent."""
        if connection.is_suspect:
            return
        connection.is_suspect = True
        delivered, was_admitted = connection.delivered, connection.is_admitted

        def decide() -> None:
            with self.lock:
                connection.is_suspect = False
                is_same = connection.delivered == delivered or kind == "silent"
                if is_same and connection.is_admitted == was_admitted and connection.monitor.is_read_out():
                    self.cut(connection, kind, reason)

        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(decide)

    def _resident(self) -> int:
        return int(os.pread(self._statm, 128, 0).split()[1]) * self._page


def _trim() -> None:
    """Return memory that libzmq has freed to the system, or resident memory would say less and less of what is held."""
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _room(wanted: int) -> int:
    """Return for how many connections there are descriptors; each takes two: libzmq's and the duplicate."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    room = max(2, (soft - _OTHER_FILES - sum(1 for _ in Path("/proc/self/fd").iterdir())) // 2)
    if room < wanted:
        _log.warning("fewer connections than the bus allows", room=room, wanted=wanted, open_files=soft)
    return min(room, wanted)
