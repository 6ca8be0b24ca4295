"""Outbox: what waits for one client's socket, bounded in bytes."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tokenbus_services.gateway.buffers import Buffers

Write = Callable[[bytes, int], bool]
"""Takes a chunk and when its row was published; tells whether the socket had room for it."""

_PIECE = 65_536


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
        "_buffers",
        "_chunks",
        "_is_closed",
        "_is_full",
        "_most",
        "_on_full",
        "_waiter",
        "is_broken",
        "is_sent",
        "peak",
        "size",
        "unsent",
        "write",
    )

    def __init__(self, most: int, on_full: Callable[[], None], buffers: Buffers) -> None:
        """Take the most bytes, who is called, once, when more wait, and the sum of all that its size counts in."""
        self._most = most
        self._on_full = on_full
        self._buffers = buffers
        self._chunks: deque[tuple[bytes, int]] = deque()
        self._is_closed = False
        self._is_full = False
        self._waiter: asyncio.Future[None] | None = None
        self.write: Write | None = None
        """Where chunks go that need not wait."""
        self.unsent: Callable[[], int] = _none
        """Tells how many bytes the socket holds that its client has not taken."""
        self.is_sent = False
        """Whether the last of it was given to the socket."""
        self.is_broken = False
        """Whether something was thrown away without which the rest is of no use."""
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
        for begin in range(0, len(chunk), _PIECE):  # a whole answer is many pieces, which are freed as they are sent
            piece = chunk if len(chunk) <= _PIECE else chunk[begin : begin + _PIECE]
            self._chunks.append((piece, produced_at_ns))
        self._wake()
        self.hold(len(chunk))

    def hold(self, count: int) -> None:
        """Count bytes that wait, here or for the answer to be whole; fewer where the number is negative."""
        self.size += count
        self.peak = max(self.peak, self.size)
        self._buffers.grow(count)
        if self.size > self._most and not self._is_full:
            self._is_full = True
            self._on_full()

    def drop(self) -> None:
        """Throw away what waits, and free it at once."""
        self._chunks.clear()
        self.hold(-self.size)

    def close(self) -> None:
        """Say that nothing more comes."""
        self._is_closed = True
        self._wake()

    @property
    def is_closed(self) -> bool:
        """Whether nothing more comes."""
        return self._is_closed

    async def ready(self) -> None:
        """Wait for something, or for the end."""
        while not self._chunks and not self._is_closed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def take(self, most: int = _PIECE) -> Sending:
        """Return about so many bytes of what waits: what is not taken yet can still be thrown away."""
        taken: list[bytes] = []
        times: list[int] = []
        size = 0
        while self._chunks and size < most:
            chunk, produced_at_ns = self._chunks.popleft()
            taken.append(chunk)
            size += len(chunk)
            if produced_at_ns:
                times.append(produced_at_ns)
        self.hold(-size)
        return Sending(b"".join(taken), times, self._is_closed and not self._chunks)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _none() -> int:
    return 0
