"""Outbox: what waits for one client's socket, bounded in bytes."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

Write = Callable[[bytes, int], bool]
"""Takes a chunk and when its row was published; tells whether the socket had room for it."""


class Sending(NamedTuple):
    """What is to be sent at once."""

    data: bytes
    produced_at_ns: list[int]
    """When each row in it was published."""
    is_last: bool


class Outbox:
    """Filled as rows come, emptied as the client reads. One task empties it.

    Once that task has said where to write, chunks go there as they come, and wait here only while the socket is full:
    to wake a task for each row costs as much as to write it.
    """

    __slots__ = (
        "_chunks",
        "_is_closed",
        "_is_full",
        "_most",
        "_on_full",
        "_times",
        "_waiter",
        "is_sent",
        "peak",
        "size",
        "write",
    )

    def __init__(self, most: int, on_full: Callable[[], None]) -> None:
        """Take the most bytes, and who is told, once, when more wait; what is put then still goes out."""
        self._most = most
        self._on_full = on_full
        self._chunks: list[bytes] = []
        self._times: list[int] = []
        self._is_closed = False
        self._is_full = False
        self._waiter: asyncio.Future[None] | None = None
        self.write: Write | None = None
        """Where chunks go that need not wait."""
        self.is_sent = False
        """Whether the last of it was given to the socket."""
        self.size = 0
        """How many bytes wait."""
        self.peak = 0
        """How many waited at most."""

    def put(self, chunk: bytes, produced_at_ns: int = 0) -> None:
        """Add what came of a row; after the end nothing is added."""
        if self._is_closed:
            return
        # While the task sends what waited before, its waiter is gone: what comes then comes after.
        may_pass = self.write is not None and self._waiter is not None and not self._chunks
        if may_pass and self.write is not None and self.write(chunk, produced_at_ns):
            return
        self._chunks.append(chunk)
        if produced_at_ns:
            self._times.append(produced_at_ns)
        self.size += len(chunk)
        self.peak = max(self.peak, self.size)
        if self.size > self._most and not self._is_full:
            self._is_full = True
            self._on_full()
        self._wake()

    def close(self) -> None:
        """Say that nothing more comes."""
        self._is_closed = True
        self._wake()

    @property
    def is_closed(self) -> bool:
        """Whether nothing more comes."""
        return self._is_closed

    async def next(self) -> Sending:
        """Wait for something, or for the end, and take all of it."""
        while not self._chunks and not self._is_closed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        sending = Sending(b"".join(self._chunks), self._times, self._is_closed)
        self._chunks, self._times, self.size = [], [], 0
        return sending

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
