"""A queue from several saving processes to one getting process, with a Unix socket for each saving process.

The saving thread writes each message into the socket at once. From then on the kernel holds the message, which arrives
even if the saving process is killed. A second thread connects when a get side starts, and writes the rest of messages
that did not fit into the socket. The get side reads at most one message ahead from each saving process. If the getting
process is killed, the next get side receives the remaining messages.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tokenbus.bus import AddressError
from tokenbus.engines.fastdeploy import native
from tokenbus.engines.fastdeploy.message import Kind
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.settings import WorkerSettings
from tokenbus.worker.errors import RetentionFullError

_log = logger("worker")
_SOCKET_BYTES = 32 << 20
"""Requested size of the kernel's buffer between the two sides, in bytes."""
_FORCE = getattr(socket, "SO_SNDBUFFORCE", socket.SO_SNDBUF)
_FEW, _LARGE = 16, 1 << 16
"""If at least `_FEW` messages or `_LARGE` bytes are retained, each send also reads acknowledgements."""
_MANY = 64
"""If at least this number of messages is unacknowledged, the second thread also reads acknowledgements."""
_BACKLOG = 128
_AGAIN_SECONDS = 0.01
"""Interval at which the get side retries acknowledgements that a full socket refused."""
_ACKNOWLEDGE_SECONDS = 1.0
"""Time limit for a closing get side to acknowledge all received messages."""
_MOST_CONNECTIONS = 1024
_NOT_THERE = (FileNotFoundError, ConnectionRefusedError, BlockingIOError)
"""Errors of a connection attempt while no get side listens or the get side's backlog is full."""
T = TypeVar("T")
Pack = Callable[[int, int], tuple[bytes, int]]


@dataclass(slots=True)
class SendCounts:
    """Counts of events on the save side."""

    saved: int = 0
    blocked: int = 0
    refused: int = 0
    connections: int = 0


class QueueFullError(RetentionFullError):
    """The queue stayed full for too long. The rank's next message marks the lost message's slots as unrecoverable."""

    def __init__(self, queue: str, lost: bytes, items: int, size: int, why: str) -> None:
        """`lost` is the lost message. `items` and `size` are the number and bytes of messages not yet received."""
        super().__init__((), items, size, why)
        self.lost = lost
        waits = f"{items} messages and {size} bytes were not received yet; this one is lost"
        self.args = (f"queue {queue}: no room ({why}): {waits}",)


class QueueSender:
    """Sends messages in order, and retains unacknowledged messages for a restarted get side."""

    def __init__(self, path: str, settings: WorkerSettings, reconnect_seconds: float) -> None:
        """Create a sender to the get side at `path`, which may start later. The settings bound the retention."""
        self._path = path
        self._settings = settings
        self._reconnect_seconds = reconnect_seconds
        self._most_bytes, self._acknowledged = native.library().most_bytes, native.library().acknowledged
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._kept: deque[bytes] = deque()
        self._bytes = 0
        self._first = 1
        """Sequence of the oldest retained message."""
        self._sent = 0
        """Number of retained messages that are completely written."""
        self._offset = 0
        """Number of bytes of the next message that are already written."""
        self._socket: socket.socket | None = None
        self._connect_at = 0.0
        """Earliest time of the next connection attempt, after a connection broke."""
        self._repeated_log = DeduplicatedLog()
        self._waiting = 0
        self._is_closed = False
        self.counts = SendCounts()
        self._wakes, self._woken = socket.socketpair()
        self._wakes.setblocking(False)  # noqa: FBT003 - the standard library's
        self._thread = threading.Thread(target=self._run, name="tokenbus-fastdeploy-save", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> tuple[int, int]:
        """Number and total bytes of the messages that are not yet acknowledged."""
        with self._lock:
            self._read_acks()
            return len(self._kept), self._bytes

    def send(self, pack: Pack) -> bytes:
        """Send the message that `pack` makes, and return the message, or raise a QueueFullError.

        `pack` gets a socket's descriptor (-1 while an earlier message is unsent) and the message's sequence. `pack`
        returns the message, and the number of bytes that the socket accepted or -errno.
        """
        with self._lock:
            if len(self._kept) >= _FEW or self._bytes >= _LARGE:
                self._read_acks()
            is_next = self._sent == len(self._kept) and self._has_room(self._most_bytes)
            connection = self._socket if is_next else None
            data, sent = pack(-1 if connection is None else connection.fileno(), self._first + len(self._kept))
            if self._is_closed or not self._has_room(len(data)):
                self._wait_for_room(data)
            self._kept.append(data)
            self._bytes += len(data)
            self.counts.saved += 1
            if connection is not None and sent == len(data):
                self._sent += 1
            else:
                self._offset = max(sent, 0) if connection is not None else self._offset
                self._write()
            if self._sent < len(self._kept) or len(self._kept) == _MANY:
                self._wake()
            return data

    def close(self, seconds: float) -> None:
        """Wait at most `seconds` until the kernel has all messages, and close."""
        with self._lock:
            deadline = time.monotonic() + seconds
            while self._sent < len(self._kept) and (left := deadline - time.monotonic()) > 0:
                self._wake()
                self._changed.wait(left)
            self._is_closed = True
            self._changed.notify_all()
            self._wake()
        self._thread.join()
        self.abandon()

    def abandon(self) -> None:
        """Close all sockets at once, which is also safe in a forked process."""
        for each in (self._socket, self._wakes, self._woken):
            if each is not None:
                each.close()
        self._socket = None

    # The following methods need the lock.

    def _has_room(self, size: int) -> bool:
        most = self._settings
        return len(self._kept) < most.most_items and self._bytes + size <= most.retention_bytes

    def _wait_for_room(self, data: bytes) -> None:
        """Wait for free space as long as the policy allows, or raise a QueueFullError."""
        self._read_acks()
        worker, why = self._settings, "policy fail"

        def is_over() -> bool:
            return self._is_closed or self._has_room(len(data))

        if worker.policy != "fail" and not is_over():
            self.counts.blocked += 1
            self._waiting += 1
            self._wake()
            self._changed.wait_for(is_over, worker.block_timeout_ms / 1000)
            self._waiting -= 1
            why = f"waited {worker.block_timeout_ms} ms"
        if self._is_closed:
            why = "closed"
        elif self._has_room(len(data)):
            return
        self.counts.refused += 1
        limits = f"at most {worker.most_items} messages and {worker.retention_bytes} bytes, {why}"
        reader = "" if self._socket else "; no process gets from it"
        raise QueueFullError(Path(self._path).name, data, len(self._kept), self._bytes, f"{limits}{reader}")

    def _connect(self) -> None:
        if time.monotonic() < self._connect_at:
            return
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)  # noqa: FBT003 - the standard library's
        try:
            connection.connect(self._path)
        except OSError as error:
            connection.close()
            if not isinstance(error, _NOT_THERE):
                self._warn("queue cannot be reached", error=error)
            return
        for option in (socket.SO_SNDBUF, _FORCE):
            with contextlib.suppress(OSError):  # only privileged processes may exceed the system's limit
                connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        self._socket = connection
        self.counts.connections += 1
        self._wake()  # the thread must watch the new connection

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._connect_at = time.monotonic() + self._reconnect_seconds
        self._sent = self._offset = 0

    def _write(self) -> None:
        """Write waiting messages until the socket's buffer is full."""
        if self._kept and self._socket is None:
            self._connect()
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
        if self._socket is None:
            return
        through = self._acknowledged(self._socket.fileno())
        if through < 0:
            self._disconnect()
        while self._first <= through and self._sent:
            self._bytes -= len(self._kept.popleft())
            self._first += 1
            self._sent -= 1
        self._changed.notify_all()

    def _warn(self, event: str, **values: object) -> None:
        self._repeated_log.begin("queue", _log.warning, event, path=self._path, **values)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the thread was already woken, or has ended
            self._wakes.send(b"\0")

    # The thread.

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._is_closed:
                    return
                self._write()
                if self._socket is None and len(self._kept) >= _MANY:
                    self._warn("no process gets from the queue", waiting=len(self._kept))
                reads = bool(self._waiting) or len(self._kept) >= _MANY
                if reads:
                    self._read_acks()
                watched = self._socket
                poll = select.poll()
                poll.register(self._woken, select.POLLIN)
                if watched is not None:  # poll always reports a closed connection
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


class Source:
    """Connection of a saving process, with the received part of the next message."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._number = connection.fileno()
        self._library = native.library()
        self._buffer = bytearray(self._library.most_bytes)  # memory is used only for the pages that messages fill
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        """Address of the message's first byte, valid until the message is acknowledged."""
        self.reading = native.Reading()
        self.is_watched = True
        self.unsent = 0
        """Sequence of an acknowledgement that the full socket of a stuck saving process refused, or 0."""

    @property
    def is_whole(self) -> bool:
        """Whether the next message has arrived completely."""
        reading = self.reading
        return bool(reading.bytes) and reading.have == reading.bytes

    @property
    def kind(self) -> Kind:
        """Kind of the message, which must be whole."""
        return Kind(self.reading.kind)

    def acknowledge(self) -> None:
        """Acknowledge the message, and prepare for the next message."""
        self.unsent = self._library.acknowledge(self._number, self.reading)

    def acknowledge_again(self) -> None:
        """Retry the acknowledgement that the full socket refused."""
        self.unsent = self.unsent and self._library.acknowledge(self._number, native.Reading(sequence=self.unsent))

    def read(self) -> int:
        """Receive the available bytes of the next message, and return the progress."""
        return int(self._library.receive(self._number, self.address, self.reading))


class QueueReceiver:
    """Delivers the messages of all saving processes in the order of saving."""

    def __init__(self, path: str) -> None:
        """Listen at a path, or raise an AddressError, for example if another process already listens."""
        self._using = threading.Lock()
        self._waiting = threading.Lock()
        """Lock that a thread holds, without any other lock, while it waits for messages."""
        self._sources: dict[int, Source] = {}
        self._unsent: set[Source] = set()
        """Connections whose full sockets refused acknowledgements."""
        self._is_closed = False
        self._repeated_log = DeduplicatedLog()
        self._path = path
        self.got = 0
        try:
            self._held = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise AddressError(f"ipc://{path}", error.strerror or str(error)) from None
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(path).unlink(missing_ok=True)  # a killed reader leaves its path behind
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.setblocking(False)  # noqa: FBT003 - the standard library's
            self._listener.bind(path)
            self._listener.listen(_BACKLOG)
        except OSError as error:
            os.close(self._held)
            taken = "another process gets from it" if isinstance(error, BlockingIOError) else ""
            raise AddressError(f"ipc://{path}", taken or error.strerror or str(error)) from None
        self._wakes, self._woken = socket.socketpair()
        self._poll = select.epoll()  # one thread may poll while another thread waits
        for each in (self._listener, self._woken):
            self._poll.register(each, select.EPOLLIN)

    def get(self, seconds: float | None, take: Callable[[Source], T]) -> T | None:
        """Pass the next message to `take`, drop the message, and return the result of `take`, or None on a timeout.

        If `seconds` is None, wait indefinitely. Threads get messages in turn, and a waiting thread does not block other
        threads. If `take` raises, the message stays in the queue.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            with self._using:
                if self._is_closed:
                    raise RuntimeError("the get side was closed")
                source = self._oldest()
                if source is not None:
                    taken = take(source)
                    self._drop_message(source)
                    return taken
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            with self._waiting:
                if not self._is_closed:
                    self._poll.poll(min(_AGAIN_SECONDS, left or _AGAIN_SECONDS) if self._unsent else left)

    def close(self) -> None:
        """Close the queue. The saving processes keep the messages that were not received."""
        self._is_closed = True
        self._wakes.send(b"\0")
        with self._waiting:  # blocks until the waiting thread has left
            pass
        with self._using:
            end = time.monotonic() + _ACKNOWLEDGE_SECONDS
            while self._unsent and time.monotonic() < end:
                self._acknowledge_again()
                time.sleep(_AGAIN_SECONDS)
            Path(self._path).unlink(missing_ok=True)
            self.abandon()

    def abandon(self) -> None:
        """Close all sockets but keep the path, which is also safe in a forked process."""
        self._poll.close()
        connections = (source.connection for source in self._sources.values())
        for each in (self._listener, self._wakes, self._woken, *connections):
            each.close()
        os.close(self._held)
        self._sources.clear()

    # The following methods need the lock `_using`.

    def _oldest(self) -> Source | None:
        self._read()
        if len(self._sources) > 1 and any(source.is_whole for source in self._sources.values()):
            # Read again, because an earlier message of another process may have arrived in the meantime.
            self._read()
        whole = [source for source in self._sources.values() if source.is_whole]
        return min(whole, key=lambda source: source.reading.stamp, default=None)

    def _drop_message(self, source: Source) -> None:
        self.got += 1
        # Watch the connection first, because a signal handler may raise, and unwatched connections are never read.
        if not source.is_watched:
            with contextlib.suppress(FileExistsError):  # an interrupted call registered the connection already
                self._poll.register(source.connection, select.EPOLLIN)
            source.is_watched = True
        source.acknowledge()
        if source.unsent:
            self._unsent.add(source)

    def _acknowledge_again(self) -> None:
        for source in self._unsent:
            source.acknowledge_again()
        self._unsent = {source for source in self._unsent if source.unsent}

    def _read(self) -> None:
        if self._unsent:
            self._acknowledge_again()
        for number, _ in self._poll.poll(0):
            source = self._sources.get(number)
            if source is not None:
                self._read_from(source, number)
            elif number == self._listener.fileno():
                self._accept()

    def _read_from(self, source: Source, number: int) -> None:
        if source.is_whole:
            source.is_watched = False
            self._poll.unregister(number)  # the next message is read only after this message is dropped
            return
        progress = source.read()
        if progress == native.REFUSED:
            self._repeated_log.begin("frame", _log.warning, "connection that sends no messages closed")
        if progress in {native.ENDED, native.REFUSED}:
            self._poll.unregister(number)
            del self._sources[number]
            self._unsent.discard(source)
            source.connection.close()

    def _accept(self) -> None:
        """Accept all waiting connections, so that `_oldest` finds the oldest message of all processes."""
        while len(self._sources) < _MOST_CONNECTIONS:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):  # no further connection waits to be accepted
                return
            except OSError as error:  # with too many open files, the connection waits for the next poll
                self._repeated_log.begin("accept", _log.warning, "queue cannot accept a connection", error=error)
                time.sleep(_AGAIN_SECONDS)
                return
            connection.setblocking(False)  # noqa: FBT003 - the standard library's
            source = Source(connection)
            number = connection.fileno()
            self._sources[number] = source
            self._poll.register(number, select.EPOLLIN)
            self._read_from(source, number)
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
