"""AcceptedConnection: the bytes that libzmq holds for one connection."""

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import socket
import struct
import termios
from collections.abc import Callable

_TCP_INFO_BYTES = 256
_BYTES_RECEIVED = 128  # offset of tcpi_bytes_received
_MUCH = 1_048_576
_STUCK_BYTES, _STUCK_SECONDS = 65_536, 0.05
"""From this many unread bytes, and this age of them, the growth of the process counts against a connection."""
_LARGE_FRAME = 256
_CURVE_BYTES = 33  # a command's name, a nonce, a proof, and the flags
_LIBC = ctypes.CDLL(None)
_NO_ADDRESS = bytes(16)  # an address of the family AF_UNSPEC: connecting to it resets a TCP connection


class AcceptedConnection:
    """A connection that libzmq has accepted, observed through a duplicate of its descriptor.

    libzmq keeps the parts of an unfinished message without any bound, and does not report its size. For TCP, the size
    follows from the kernel's count: the bytes that arrived, minus the bytes of whole messages that were read. The
    kernel has no such count for a Unix socket, and libzmq needs thirty times the memory for tiny parts. So the growth
    of the process counts too: from the last finished message of the connection, while it sends more.
    """

    report: Callable[["AcceptedConnection", str], None]
    """Reports the reason of a cut to the owner of the listening socket."""
    is_read_out: Callable[[], bool]
    """Returns, on the event loop, whether every message at the listening socket was read."""

    def __init__(self, descriptor: int, local_address: object, handshakes: int, now: float) -> None:
        """Duplicate a descriptor; `handshakes` is the number of handshakes that were answered before.

        Raises OSError if the connection has ended. By now its descriptor may belong to something else, whose local
        address then differs from the listening socket's.
        """
        duplicate = os.dup(descriptor)
        try:
            self.connection = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            raise
        if local_address_of(self.connection) != local_address:
            self.connection.close()
            raise OSError(errno.EBADF, "another connection's descriptor")
        self.handshakes = handshakes
        self.accepted = self.moved = now
        self.peer = b""
        self.public = ""
        """The peer's proven key, in Z85; empty if the listener asks for none."""
        self.delivered = 0
        """Bytes of the messages that were read, with their framing; only the event loop writes this."""
        self.held = self.grown = 0
        """Bytes over TCP that are not yet read as whole messages.

        The second value is the growth of the process during an unfinished message.
        """
        self.is_admitted = self.is_cut = self.is_suspect = False
        self.cut_at: float | None = None
        self._read_before = -1
        self.grown_from = 0
        self._unread_at: float | None = None

    @property
    def is_tcp(self) -> bool:
        """Whether the kernel counts the connection's bytes."""
        return self.connection.family != socket.AF_UNIX

    def measure(self, now: float, resident: int) -> None:
        """Update `held` and `grown`; `resident` is the process's memory in bytes."""
        if self.is_tcp:
            self.held = self._measure_tcp()
        if self.delivered != self._read_before or (self.is_tcp and not self.held):
            self._read_before, self.moved, self.grown_from = self.delivered, now, resident
            self._unread_at = None
        self.grown_from = min(self.grown_from, resident)
        is_unfinished = self.held > _STUCK_BYTES if self.is_tcp else self._in_kernel() > 0
        if is_unfinished and self._unread_at is None:
            self._unread_at = now
        is_stuck = is_unfinished and self._unread_at is not None and now - self._unread_at > _STUCK_SECONDS
        self.grown = resident - self.grown_from if is_stuck else 0

    def _measure_tcp(self) -> int:
        info = self.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        (received,) = struct.unpack_from("=Q", info, _BYTES_RECEIVED)
        held = int(received) - self.delivered
        if held > _MUCH:  # this much may be in the kernel's buffer, which is not memory of this process
            held -= self._in_kernel()
        return max(0, held)

    def _in_kernel(self) -> int:
        return int.from_bytes(fcntl.ioctl(self.connection, termios.FIONREAD, bytes(4)), "little")

    def shut_down(self, *, reset: bool = False) -> None:
        """End the connection: libzmq reads an end of file, and frees the connection's memory.

        With `reset`, libzmq does not read the bytes that are left in the kernel.
        """
        self.is_cut = True
        if reset and self.is_tcp and not _LIBC.connect(self.connection.fileno(), _NO_ADDRESS, len(_NO_ADDRESS)):
            return
        with contextlib.suppress(OSError):  # it has ended already
            self.connection.shutdown(socket.SHUT_RDWR)

    def was_closed_by_peer(self) -> bool:
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)  # not SHUT_RD: much may still be unread
        return bool(poll.poll(0))

    def __str__(self) -> str:
        with contextlib.suppress(OSError):
            address = self.connection.getpeername()
            if isinstance(address, tuple):
                return f"{address[0]}:{address[1]}"
        return "a peer"


def local_address_of(connection: socket.socket) -> object:
    """Return the port or path of a socket; a listening socket shares it with the connections that it accepts."""
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
