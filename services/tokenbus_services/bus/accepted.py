"""One accepted connection, as its listener's side counts it: what came in, what was read, and what is held between."""

import contextlib
import ctypes
import fcntl
import os
import select
import socket
import struct
import termios

_TCP_INFO_BYTES = 256
_BYTES_RECEIVED = 128  # offset of tcpi_bytes_received
_WORTH_A_LOOK = 1_048_576
_LARGE_FRAME = 256
_CURVE_BYTES = 33  # a command's name, a nonce, a proof, and the flags

_LIBC = ctypes.CDLL(None)
_NOWHERE = bytes(16)
"""An address of the family AF_UNSPEC: to connect there is to disconnect, at once."""


class Accepted:
    """A connection that libzmq has accepted, by a duplicate of its descriptor.

    libzmq holds an unfinished message of several parts without any bound, and says nothing about it. But the kernel
    counts a TCP connection's bytes, so what came in and was not read as whole messages is known. For a Unix socket the
    kernel has no such count: what is held is taken to be the process's growth since the connection last stopped
    finishing messages, while more of it keeps coming.
    """

    __slots__ = (
        "accepted",
        "connection",
        "cut_at",
        "delivered",
        "grown_from",
        "handshakes",
        "held",
        "is_admitted",
        "is_cut",
        "is_suspect",
        "moved",
        "peer",
        "public",
        "read_before",
        "unread_looks",
    )

    def __init__(self, descriptor: int, handshakes: int, now: float) -> None:
        """Duplicate a descriptor; `handshakes` is how many were answered before it was accepted."""
        duplicate = os.dup(descriptor)
        try:
            self.connection = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            raise
        self.handshakes = handshakes
        self.accepted = self.moved = now
        self.peer = b""
        self.public = ""
        """The key that it proved, in Z85; empty where none is asked for."""
        self.delivered = 0
        """Bytes that were read, with their framing; written by the event loop alone."""
        self.held = 0
        self.is_admitted = self.is_cut = self.is_suspect = False
        self.cut_at: float | None = None
        self.read_before = self.grown_from = self.unread_looks = 0

    @property
    def is_tcp(self) -> bool:
        """Whether the kernel counts its bytes."""
        return self.connection.family != socket.AF_UNIX

    def look(self, now: float, resident: int) -> None:
        """Find out what is held of it; `resident` is the process's memory."""
        if self.is_tcp:
            self._look_at_tcp()
        else:
            self._look_at_ipc(resident)
        if self.delivered != self.read_before or not self.held:
            self.read_before, self.moved = self.delivered, now

    def _look_at_tcp(self) -> None:
        info = self.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        (received,) = struct.unpack_from("=Q", info, _BYTES_RECEIVED)
        held = received - self.delivered
        if held > _WORTH_A_LOOK:  # less than the kernel's own buffer may hold, which is not this process's memory
            held -= self._in_kernel()
        self.held = max(0, held)

    def _look_at_ipc(self, resident: int) -> None:
        if self.delivered != self.read_before:
            self.unread_looks = self.held = 0
        elif self._in_kernel():
            self.unread_looks += 1
            self.grown_from = resident if self.unread_looks == 1 else min(self.grown_from, resident)
            self.held = max(0, resident - self.grown_from)

    def _in_kernel(self) -> int:
        return int.from_bytes(fcntl.ioctl(self.connection, termios.FIONREAD, bytes(4)), "little")

    def shut(self, *, at_once: bool = False) -> None:
        """End it: libzmq reads an end, and lets go of all that it holds of it.

        At once: with a reset, and without what the kernel has still to hand over, which may be as much again.
        """
        self.is_cut = True
        if at_once and self.is_tcp and not _LIBC.connect(self.connection.fileno(), _NOWHERE, len(_NOWHERE)):
            return
        with contextlib.suppress(OSError):  # it has ended by itself
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the duplicate back."""
        self.connection.close()

    def was_closed_by_peer(self) -> bool:
        """Tell whether the other side has ended it."""
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)  # not a read: a peer may leave with much of it unread
        return bool(poll.poll(0))

    def __str__(self) -> str:
        """Return where it comes from, as far as it says."""
        with contextlib.suppress(OSError):
            where = self.connection.getpeername()
            if isinstance(where, tuple):
                return f"{where[0]}:{where[1]}"
        return "a peer"


def bytes_on_the_wire(parts: list[bytes], *, with_curve: bool) -> int:
    """Return how many bytes a message takes in ZMTP 3."""
    overhead = _CURVE_BYTES if with_curve else 0
    total = 0
    for part in parts:
        size = len(part) + overhead
        total += size + (2 if size < _LARGE_FRAME else 9)
    return total
