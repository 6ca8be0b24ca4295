"""QueueReceiver: the get side of the queue, all of it in the thread that gets.

It reads one message of each process that saves, and no more: what was not got stays where a get side that is started
after this one was killed finds it.
"""

import contextlib
import fcntl
import os
import select
import socket
import threading
import time
from pathlib import Path

from tokenbus_contracts import ContractError
from tokenbus_engines.fastdeploy.message import HEADER_BYTES, Header, Message, header_of, unpacked
from tokenbus_engines.fastdeploy.saving import ACK_BYTES
from tokenbus_services.bus import AddressError
from tokenbus_services.logs import DeduplicatedLog, logger

_log = logger("worker")
_BACKLOG = 128
_MOST_CONNECTIONS = 1024


class _Source:
    """One process that saves: what has come of its next message."""

    __slots__ = ("_have", "_into", "connection", "header", "is_whole")

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.forget()

    def forget(self) -> None:
        """Begin with the next message."""
        self.header: Header | None = None
        self.is_whole = False
        self._into = bytearray(HEADER_BYTES)
        self._have = 0

    def read(self) -> bool:
        """Read of the next message what is there; False: this was the last that came."""
        while not self.is_whole:
            try:
                count = self.connection.recv_into(memoryview(self._into)[self._have :])
            except BlockingIOError:
                return True
            if not count:
                return False
            self._have += count
            if self._have < len(self._into):
                continue
            if self.header is None:
                self.header = header_of(self._into)
                self._into = bytearray(self.header.size - HEADER_BYTES)
                self._have = 0
            self.is_whole = self._have == len(self._into)
        return True

    def message(self) -> Message:
        """Return the message that is here whole."""
        assert self.header is not None  # noqa: S101 - it is whole
        return unpacked(self.header, self._into)


class QueueReceiver:
    """Hands out messages in the order in which they were saved, over all processes that save."""

    def __init__(self, path: str) -> None:
        """Listen at a path, or raise an AddressError: another process gets from it."""
        self._using = threading.Lock()
        self._sources: dict[int, _Source] = {}
        self._next: Message | None = None
        self._is_closed = False
        self._repeated_log = DeduplicatedLog()
        self._path = path
        self.got = 0
        self._held = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(path).unlink(missing_ok=True)  # of one that was killed
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.setblocking(False)  # noqa: FBT003 - the standard library's
            self._listener.bind(path)
            self._listener.listen(_BACKLOG)
        except OSError as error:
            os.close(self._held)
            why = (
                "another process gets from it" if isinstance(error, BlockingIOError) else (error.strerror or str(error))
            )
            raise AddressError(f"ipc://{path}", why) from None
        self._wakes, self._woken = socket.socketpair()
        self._poll = select.poll()
        for each in (self._listener, self._woken):
            self._poll.register(each, select.POLLIN)

    def peek(self, seconds: float | None) -> Message | None:
        """Return the next message, or None if there is none within some seconds; None: wait as long as it takes."""
        with self._using:
            if self._next is not None:
                return self._next
            deadline = None if seconds is None else time.monotonic() + seconds
            self._read(0)
            while not (whole := self._whole()):
                if self._is_closed:
                    raise RuntimeError("the get side was closed")
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._read(None if left is None else left * 1000)
            if len(self._sources) > 1:
                # What another process saved before this was is there now, though it may not have been a moment ago.
                self._read(0)
                whole = self._whole()
            first = min(whole, key=_stamp)
            self._next = first.message()
            self._acknowledge(first)
            return self._next

    def pop(self) -> None:
        """Learn that the message that was looked at is taken."""
        self._next = None
        self.got += 1

    def close(self) -> None:
        """End; what was not got is kept by the processes that saved it."""
        self._is_closed = True
        self._wakes.send(b"\0")  # wakes a thread that waits
        with self._using:
            Path(self._path).unlink(missing_ok=True)
            self.abandon()

    def abandon(self) -> None:
        """Close what is open, and leave the path alone: for a process that was forked off, too."""
        for each in (
            self._listener,
            self._wakes,
            self._woken,
            *(source.connection for source in self._sources.values()),
        ):
            each.close()
        os.close(self._held)
        self._sources.clear()

    def _whole(self) -> list[_Source]:
        return [source for source in self._sources.values() if source.is_whole]

    def _read(self, milliseconds: float | None) -> None:
        for number, _ in self._poll.poll(milliseconds):
            source = self._sources.get(number)
            if source is not None:
                self._read_from(source, number)
            elif number == self._listener.fileno():
                self._accept()

    def _read_from(self, source: _Source, number: int) -> None:
        if source.is_whole:
            self._poll.unregister(number)  # nothing is done with it until that one is got
            return
        try:
            goes_on = source.read()
        except ConnectionError:
            goes_on = False
        except ContractError as error:
            self._repeated_log.begin("frame", _log.warning, "saved message refused", reason=str(error))
            goes_on = False
        if not goes_on:
            self._drop(source, number)

    def _drop(self, source: _Source, number: int) -> None:
        self._poll.unregister(number)
        del self._sources[number]
        source.connection.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone again
            return
        if len(self._sources) >= _MOST_CONNECTIONS:
            connection.close()
            return
        connection.setblocking(False)  # noqa: FBT003 - the standard library's
        source = _Source(connection)
        number = connection.fileno()
        self._sources[number] = source
        self._poll.register(number, select.POLLIN)
        self._read_from(source, number)

    def _acknowledge(self, source: _Source) -> None:
        """Tell the process that saved a message that it was got: from now on it is the caller's."""
        assert source.header is not None  # noqa: S101 - it is whole
        sequence = source.header.sequence
        number = source.connection.fileno()
        source.forget()
        with contextlib.suppress(OSError):  # it has ended
            source.connection.send(sequence.to_bytes(ACK_BYTES, "little"))
        self._poll.register(number, select.POLLIN)


def _stamp(source: _Source) -> int:
    return source.header.stamp if source.header is not None else 0
