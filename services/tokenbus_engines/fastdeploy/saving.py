"""QueueSender: the save side of the queue.

What is saved is written at once, by the thread that saves it, into a Unix socket that the get side listens at; what was
written is the kernel's, and is got also if this process is killed. A thread of its own does only what cannot be done at
once: it connects when a get side comes, and goes on where the socket had no more room.
"""

import contextlib
import select
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass

from tokenbus_services.settings import WorkerSettings
from tokenbus_services.worker.errors import RetentionFullError

_SOCKET_BYTES = 32 << 20
"""How much the kernel may hold between the two sides, where it lets us choose."""
_FORCE = getattr(socket, "SO_SNDBUFFORCE", socket.SO_SNDBUF)
ACK_BYTES = 8
_FEW = 16
"""So many messages are kept before acknowledgements are read: one look costs as much for many as for one."""
_MANY = 64
"""With so many messages not got the thread reads acknowledgements, too: the kernel keeps some 270 for us."""


@dataclass(slots=True)
class SendCounts:
    """What happened on the save side."""

    saved: int = 0
    blocked: int = 0
    """Messages that had to wait for room."""
    refused: int = 0
    """Messages that found none."""
    connections: int = 0
    peak_items: int = 0
    peak_bytes: int = 0


class QueueFullError(RetentionFullError):
    """There was no room in the queue, and there was none in time: the message is lost, and the next one says so."""

    def __init__(self, items: int, size: int, why: str) -> None:
        """Keep how much waits to be got."""
        super().__init__((), items, size, why)
        self.args = (f"queue: no room ({why}): {items} messages and {size} bytes were not got yet; this one is lost",)


class QueueSender:
    """Sends messages in order, and keeps each until it was got, so that a get side that comes again misses none."""

    def __init__(self, path: str, settings: WorkerSettings, reconnect_seconds: float) -> None:
        """Send to the get side that listens at a path, now or later; retention is as the settings say."""
        self._path = path
        self._settings = settings
        self._reconnect_seconds = reconnect_seconds
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._kept: deque[bytes] = deque()
        self._bytes = 0
        self._first = 1
        """The sequence of the oldest message that is kept."""
        self._sent = 0
        """How many of those that are kept are written whole."""
        self._offset = 0
        """How much of the next one is."""
        self._socket: socket.socket | None = None
        self._acks = b""
        self._waiting = 0
        self._is_closed = False
        self.counts = SendCounts()
        self._wakes, self._woken = socket.socketpair()
        self._wakes.setblocking(False)  # noqa: FBT003 - the standard library's
        self._thread = threading.Thread(target=self._run, name="tokenbus-fastdeploy-save", daemon=True)
        self._thread.start()

    @property
    def next_sequence(self) -> int:
        """The sequence of the next message."""
        return self._first + len(self._kept)

    @property
    def waiting(self) -> tuple[int, int]:
        """How many messages were not got yet, as far as is known here, and how many bytes they have."""
        with self._lock:
            self._read_acks()
            return len(self._kept), self._bytes

    def send(self, data: bytes) -> None:
        """Send a message whose sequence is the next one, or raise a QueueFullError."""
        with self._lock:
            if len(self._kept) >= _FEW:
                self._read_acks()
            if not self._has_room(len(data)):
                self._read_acks()
                if not self._has_room(len(data)):
                    self._wait_for_room(len(data))
            self._kept.append(data)
            self._bytes += len(data)
            counts = self.counts
            counts.saved += 1
            counts.peak_items = max(counts.peak_items, len(self._kept))
            counts.peak_bytes = max(counts.peak_bytes, self._bytes)
            if self._socket is None:
                self._connect()
            if self._socket is not None:
                self._write()
            if self._sent < len(self._kept) or len(self._kept) == _MANY:
                self._wake()

    def close(self, seconds: float) -> None:
        """Wait until all is in the kernel's hands, at most so many seconds, and end."""
        with self._lock:
            deadline = time.monotonic() + seconds
            while self._sent < len(self._kept) and (left := deadline - time.monotonic()) > 0:
                self._wake()
                self._changed.wait(left)
            self._is_closed = True
            self._wake()
        self._thread.join()
        self.abandon()

    def abandon(self) -> None:
        """Close what is open, without a word to anybody: for a process that was forked off, too."""
        for each in (self._socket, self._wakes, self._woken):
            if each is not None:
                each.close()

    # With the lock held.

    def _has_room(self, size: int) -> bool:
        most = self._settings
        return len(self._kept) < most.retention_items and self._bytes + size <= most.retention_bytes

    def _wait_for_room(self, size: int) -> None:
        worker = self._settings
        why = "policy fail"
        if worker.policy != "fail":
            self.counts.blocked += 1
            self._waiting += 1
            self._wake()
            found = self._changed.wait_for(
                lambda: self._is_closed or self._has_room(size), worker.block_timeout_ms / 1000
            )
            self._waiting -= 1
            if found and not self._is_closed:
                return
            why = "closed" if self._is_closed else f"waited {worker.block_timeout_ms} ms"
        self.counts.refused += 1
        raise QueueFullError(len(self._kept), self._bytes, why)

    def _connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)  # noqa: FBT003 - the standard library's
        try:
            connection.connect(self._path)
        except OSError:  # no get side is there yet, or it has too many to take up just now
            connection.close()
            return
        for option in (socket.SO_SNDBUF, _FORCE):
            with contextlib.suppress(OSError):  # only some may have more than the system's limit
                connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        self._socket = connection
        self._acks = b""
        self.counts.connections += 1
        self._wake()  # the thread looks at this one from now on

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._sent = self._offset = 0

    def _write(self) -> None:
        """Write what waits, as far as there is room."""
        connection = self._socket
        if connection is None:
            return
        try:
            while self._sent < len(self._kept):
                data = self._kept[self._sent]
                while self._offset < len(data):
                    self._offset += connection.send(memoryview(data)[self._offset :] if self._offset else data)
                self._sent += 1
                self._offset = 0
        except BlockingIOError:
            return
        except OSError:
            self._read_acks()
            self._disconnect()
            return
        self._changed.notify_all()

    def _read_acks(self) -> None:
        """Let go of what was got."""
        while self._socket is not None:
            try:
                found = self._socket.recv(4096)
            except BlockingIOError:
                return
            except OSError:
                found = b""
            if not found:
                self._disconnect()
                return
            self._acks += found
            whole = len(self._acks) - len(self._acks) % ACK_BYTES
            if whole:
                self._acknowledge(int.from_bytes(self._acks[whole - ACK_BYTES : whole], "little"))
                self._acks = self._acks[whole:]

    def _acknowledge(self, through: int) -> None:
        while self._kept and self._first <= through and self._sent:
            self._bytes -= len(self._kept.popleft())
            self._first += 1
            self._sent -= 1
        self._changed.notify_all()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is woken already
            self._wakes.send(b"\0")

    # The thread.

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._is_closed:
                    return
                if self._kept and self._socket is None:
                    self._connect()
                self._write()
                reads = bool(self._waiting) or len(self._kept) >= _MANY
                if reads:
                    self._read_acks()
                watched = self._socket
                poll = select.poll()
                poll.register(self._woken, select.POLLIN)
                if watched is not None:  # a get side that ends is reported whatever is asked for
                    is_behind = self._sent < len(self._kept)
                    poll.register(watched, select.POLLOUT * is_behind | select.POLLIN * reads)
                retry = self._reconnect_seconds * 1000 if self._kept and watched is None else None
            for number, found in poll.poll(retry):
                if number == self._woken.fileno():
                    self._woken.recv(4096)
                elif found & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
                    with self._lock:
                        if self._socket is watched:
                            self._read_acks()
                            self._disconnect()
