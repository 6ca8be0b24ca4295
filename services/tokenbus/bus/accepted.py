"""AcceptedConnection: measures the bytes that libzmq buffers for one connection."""

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
_BYTES_RECEIVED = 128  # offset of tcpi_bytes_received in the kernel's struct tcp_info
_MUCH = 1_048_576
_STUCK_BYTES, _STUCK_SECONDS = 65_536, 0.05
"""A connection is blamed for memory growth if more bytes than this stay unread for more than this many seconds."""
_LARGE_FRAME = 256
_CURVE_BYTES = 33  # CURVE adds a command name, a nonce, an authenticator and flags to each part
_LIBC = ctypes.CDLL(None)
_NO_ADDRESS = bytes(16)  # connecting a TCP socket to an AF_UNSPEC address resets the connection


class AcceptedConnection:
    """A connection that libzmq has accepted, observed through a duplicate of its descriptor.

    libzmq buffers the parts of an unfinished message without a bound, and does not report the size of this buffer. For
    TCP, the buffer's size is the kernel's count of received bytes minus the bytes of the messages that were read. For a
    Unix socket, the kernel does not count received bytes. In libzmq, tiny parts occupy thirty times their size.
    Therefore the growth of the process since the connection's last finished message is also measured.
    """

    report: Callable[["AcceptedConnection", str], None]
    """Callback that tells the owner of the listening socket why a connection was cut off."""
    is_read_out: Callable[[], bool]
    """Callback, for the event loop only, that returns whether every message at the listening socket was read."""

    def __init__(self, descriptor: int, local_address: object, handshakes: int, now: float) -> None:
        """Duplicate a descriptor; `handshakes` is the number of handshakes answered before this connection.

        Raises OSError if the connection has ended. Once a connection has ended, its descriptor number may belong to
        another file, which has another local address.
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
        """Public key of the peer in Z85, verified by the handshake, or empty if the listener requires no keys."""
        self.delivered = 0
        """Wire bytes of the messages that were read; only the event loop writes this attribute."""
        self.held = self.grown = 0
        """`held` is the number of received TCP bytes that were not yet read as whole messages.

        `grown` is the growth of the process during an unfinished message, in bytes.
        """
        self.is_admitted = self.is_cut = self.is_suspect = False
        self.cut_at: float | None = None
        self._read_before = -1
        self.grown_from = 0
        self._unread_at: float | None = None

    @property
    def is_tcp(self) -> bool:
        return self.connection.family != socket.AF_UNIX

    def measure(self, now: float, resident: int) -> None:
        """Update `held` and `grown`; `resident` is the resident memory of the process in bytes."""
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
        if held > _MUCH:  # a part of the `held` bytes may still be in the kernel, outside this process's memory
            held -= self._in_kernel()
        return max(0, held)

    def _in_kernel(self) -> int:
        return int.from_bytes(fcntl.ioctl(self.connection, termios.FIONREAD, bytes(4)), "little")

    def shut_down(self, *, reset: bool = False) -> None:
        """End the connection, so that libzmq reads an end of file and frees the connection's memory.

        With `reset`, libzmq does not read the bytes that remain in the kernel's buffer.
        """
        self.is_cut = True
        if reset and self.is_tcp and not _LIBC.connect(self.connection.fileno(), _NO_ADDRESS, len(_NO_ADDRESS)):
            return
        with contextlib.suppress(OSError):  # the connection has ended already
            self.connection.shutdown(socket.SHUT_RDWR)

    def was_closed_by_peer(self) -> bool:
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)  # POLLRDHUP is set even while bytes are unread
        return bool(poll.poll(0))

    def __str__(self) -> str:
        with contextlib.suppress(OSError):
            address = self.connection.getpeername()
            if isinstance(address, tuple):
                return f"{address[0]}:{address[1]}"
        return "a peer"


def local_address_of(connection: socket.socket) -> object:
    """Return a socket's local port or path, which a listening socket shares with its accepted connections."""
    name = connection.getsockname()
    return name[1] if isinstance(name, tuple) else name


def bytes_on_the_wire(parts: list[bytes], *, with_curve: bool) -> int:
    """Return the size of a message on a ZMTP 3 connection, in bytes."""
    overhead = _CURVE_BYTES if with_curve else 0
    total = 0
    for part in parts:
        size = len(part) + overhead
        total += size + (2 if size < _LARGE_FRAME else 9)
    return total
