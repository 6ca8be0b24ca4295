"""AcceptedConnection: how many bytes libzmq holds of a connection that it has accepted."""

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import socket
import struct
import termios
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenbus_services.bus.monitor import Monitor

_TCP_INFO_BYTES = 256
_BYTES_RECEIVED = 128  # offset of tcpi_bytes_received
_MUCH = 1_048_576
_DOUBTFUL = 16_777_216
_IPC_SECONDS = 0.02
"""How long an unfinished message on a Unix socket must keep growing before its bytes are charged to that peer."""
_LARGE_FRAME = 256
_CURVE_BYTES = 33  # a command's name, a nonce, a proof, and the flags

_LIBC = ctypes.CDLL(None)
_NOWHERE = bytes(16)
"""An address of the family AF_UNSPEC: connecting to it resets a TCP connection."""


class AcceptedConnection:
    """A connection that libzmq has accepted, by a duplicate of its descriptor.

    libzmq holds an unfinished message of several parts without any bound, and does not report it. But the kernel counts
    a TCP connection's bytes: those that arrived, less those that were read as whole messages, are held. For a Unix
    socket the kernel has no such count: what is held is taken to be the process's growth since the connection last
    finished a message, once more of it was seen to come for a while.
    """

    monitor: "Monitor"
    """That of the listening socket which accepted it."""

    def __init__(self, descriptor: int, listens_at: object, handshakes: int, now: float) -> None:
        """Duplicate a descriptor; `handshakes` is the number of those that were answered before it was accepted.

        Raises OSError if the connection has ended: its descriptor may by now be of something else in this process,
        which is not at the place where its listener `listens_at` (see `place`).
        """
        duplicate = os.dup(descriptor)
        try:
            self.connection = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            raise
        if place(self.connection) != listens_at:
            self.connection.close()
            raise OSError(errno.EBADF, "another connection's descriptor")
        self.handshakes = handshakes
        self.accepted = self.moved = now
        self.peer = b""
        self.public = ""
        """The key that its peer proved, in Z85; empty where none is asked for."""
        self.delivered = 0
        """Bytes that were read, with their framing; only the event loop writes it."""
        self.held = 0
        self.is_admitted = self.is_cut = self.is_suspect = False
        self.cut_at: float | None = None
        self.read_before = -1
        self._has_spoken = False
        self._grown_from = 0
        self._unread_at: float | None = None

    @property
    def is_tcp(self) -> bool:
        """Whether it is over TCP, so that the kernel counts its bytes."""
        return self.connection.family != socket.AF_UNIX

    def measure(self, now: float, resident: int) -> None:
        """Update `held`; `resident` is the process's memory in bytes."""
        if self.is_tcp:
            self._measure_tcp()
        else:
            self._measure_ipc(now, resident)
        if self.delivered != self.read_before or not self.held:
            self.read_before, self.moved = self.delivered, now

    def has_spoken(self) -> bool:
        """Tell whether its peer has sent anything; of a Unix socket's peer only a whole message is known."""
        if not self._has_spoken:
            with contextlib.suppress(OSError):  # it has ended already
                self._has_spoken = bool(self.peer or (self.is_tcp and self._received()))
        return self._has_spoken

    def _received(self) -> int:
        info = self.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        (received,) = struct.unpack_from("=Q", info, _BYTES_RECEIVED)
        return int(received)

    def _measure_tcp(self) -> None:
        held = self._received() - self.delivered
        if held > _MUCH:  # less may be in the kernel's buffer, which is not this process's memory
            held -= self._in_kernel()
        self.held = max(0, held)

    def _measure_ipc(self, now: float, resident: int) -> None:
        if self.delivered != self.read_before:
            self._grown_from, self._unread_at, self.held = resident, None, 0
            return
        self._grown_from = min(self._grown_from, resident)
        if not self._in_kernel():
            return
        if self._unread_at is None:
            self._unread_at = now
        if now - self._unread_at >= _IPC_SECONDS:
            self.held = resident - self._grown_from

    @property
    def is_closed(self) -> bool:
        """Whether its duplicate is closed: it has ended."""
        return self.connection.fileno() < 0

    def is_doubtful(self, resident: int) -> bool:
        """Tell whether what the process grew by may be this one's, which only many looks at it can tell."""
        return not self.is_tcp and resident - self._grown_from > _DOUBTFUL

    def _in_kernel(self) -> int:
        return int.from_bytes(fcntl.ioctl(self.connection, termios.FIONREAD, bytes(4)), "little")

    def shut_down(self, *, reset: bool = False) -> None:
        """End it: libzmq reads an end of file, and frees all that it holds of it.

        With a reset it does not read what is left in the kernel, which may be as much again.
        """
        self.is_cut = True
        if reset and self.is_tcp and not _LIBC.connect(self.connection.fileno(), _NOWHERE, len(_NOWHERE)):
            return
        with contextlib.suppress(OSError):  # it has ended already
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the duplicate."""
        self.connection.close()

    def was_closed_by_peer(self) -> bool:
        """Return whether the peer has closed it."""
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)  # not a read: much may still be unread
        return bool(poll.poll(0))

    def __str__(self) -> str:
        with contextlib.suppress(OSError):
            where = self.connection.getpeername()
            if isinstance(where, tuple):
                return f"{where[0]}:{where[1]}"
        return "a peer"


def place(connection: socket.socket) -> object:
    """Return where a socket is: a port, or a path; a listening socket and what it accepts are at the same."""
    name = connection.getsockname()
    return name[1] if isinstance(name, tuple) else name


def bytes_on_the_wire(parts: list[bytes], *, with_curve: bool) -> int:
    """Return the size of a message in ZMTP 3."""
    overhead = _CURVE_BYTES if with_curve else 0
    total = 0
    for part in parts:
        size = len(part) + overhead
        total += size + (2 if size < _LARGE_FRAME else 9)
    return total
