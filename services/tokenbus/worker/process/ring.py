"""Ring: records in shared memory, from one process that writes them to one that takes them.

What is written stays there until it is taken, whichever of the two processes dies meanwhile: a record is there once
one word, the writer's place, says so.
"""

import struct
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

_HEAD, _TAIL, _TAKEN, _FREED, _WRITTEN = range(5)
PAGE_BYTES = 4096
"""The records come behind a page of words: the writer's place, the reader's, and how many were taken; up to where the
memory is free, and how many records were written."""
_RECORD = struct.Struct("<QII")
"""Before each record's bytes: its number, from 1 on, its length, and its kind."""
RECORD_BYTES = _RECORD.size
_FREED_BYTES = 2**20
"""How much of the memory of what was taken is given back to the system at once."""
_SKIP = 0
"""The kind of what fills the end of the memory, where the next record finds no room."""


class Record(NamedTuple):
    """One record, still in the ring: its bytes stay as they are until it is taken."""

    number: int
    kind: int
    data: memoryview
    end: int
    """The reader's place behind it."""


def ring_bytes(size: int, items: int, largest: int) -> int:
    """Return how much memory, in whole pages, a ring needs for so many records of so many bytes, wherever it wraps."""
    needed = _padded(size) + _padded(largest) + (items + 1) * (RECORD_BYTES + 8) + _FREED_BYTES
    return PAGE_BYTES * (2 + needed // PAGE_BYTES)


class Ring:
    """A bounded queue of records in memory that two processes share; each side is used by one thread at a time."""

    def __init__(self, memory: memoryview, most: int, free: Callable[[int, int], None] | None = None) -> None:
        """Take the memory, which is zeros at first, and how many records may wait in it.

        `free` is called by the reader's side with the beginning and the length of memory that holds nothing any more.
        """
        self._words = memory[: 5 * 8].cast("Q")
        self._data = memory[PAGE_BYTES:]
        self._capacity = len(self._data)
        self._most = most
        self._free = free
        self._fence = threading.Lock()
        self._fence.acquire()
        self._begin = 0
        """Where the record begins that is being filled."""
        self._place = self._words[_HEAD]
        # In this order: the other side may take some meanwhile.
        self._written = max([*(record.number for record in self.waiting()), self.taken])

    # The writer's side.

    def __len__(self) -> int:
        """Return how many of the records that were written are not taken."""
        return self._written - self.taken

    def has_room(self, size: int) -> bool:
        """Tell whether a record of so many bytes can be written now."""
        return len(self) < self._most and self._fits(size)

    def room(self, size: int) -> memoryview:
        """Return the memory of the next record, to be filled; `commit` makes a record of it. There must be room."""
        begin = self._begin = self._next_begin(size)
        return self._data[begin + RECORD_BYTES : begin + RECORD_BYTES + size]

    def commit(self, kind: int, size: int) -> int:
        """Let the other side have the record that was filled; return its number."""
        begin, place = self._begin, self._place
        if begin != (behind := place % self._capacity):
            if behind + RECORD_BYTES <= self._capacity:
                _RECORD.pack_into(self._data, behind, 0, 0, _SKIP)
            place += self._capacity - behind
        number = self._written + 1
        _RECORD.pack_into(self._data, begin, number, size, kind)
        place += RECORD_BYTES + _padded(size)
        self._place, self._written = place, number
        self._order()
        self._words[_WRITTEN] = number
        self._words[_HEAD] = place
        return number

    def put(self, kind: int, *parts: bytes | memoryview) -> int:
        """Write a record of some parts, for which there must be room; return its number."""
        size = sum(map(len, parts))
        room, at = self.room(size), 0
        for part in parts:
            room[at : at + len(part)] = part
            at += len(part)
        return self.commit(kind, size)

    def _next_begin(self, size: int) -> int:
        """Return where the next record begins: at the writer's place, or at 0 where it does not fit behind it."""
        begin = self._place % self._capacity
        return begin if begin + RECORD_BYTES + _padded(size) <= self._capacity else 0

    def _fits(self, size: int) -> bool:
        used, needed = self._place - self._words[_FREED], RECORD_BYTES + _padded(size)
        skipped = 0 if self._next_begin(size) else -self._place % self._capacity
        return used + skipped + needed <= self._capacity

    # The reader's side.

    @property
    def taken(self) -> int:
        """How many records were taken, and so the number of the last of them."""
        return self._words[_TAKEN]

    @property
    def tail(self) -> int:
        """The reader's place."""
        return self._words[_TAIL]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take."""
        return self._words[_HEAD] == self._words[_TAIL] or self.next() is None

    @property
    def waiting_count(self) -> int:
        """How many records there are to take."""
        return self._words[_WRITTEN] - self._words[_TAKEN]

    def next(self) -> Record | None:
        """Return the oldest record that was not taken, or None."""
        return next(self.waiting(), None)

    def waiting(self, since: int | None = None) -> Iterator[Record]:
        """Return the records that were not taken, oldest first; or those behind an earlier place of the reader's."""
        place, head, taken = self.tail if since is None else since, self._words[_HEAD], self.taken
        self._order()
        while place < head:
            begin, number, size, kind = place % self._capacity, 0, 0, _SKIP
            if begin + RECORD_BYTES <= self._capacity:
                number, size, kind = _RECORD.unpack_from(self._data, begin)
            if kind == _SKIP:
                place += self._capacity - begin
                continue
            place += RECORD_BYTES + _padded(size)
            if number > taken or since is not None:  # a reader that died may have said the one and not the other
                yield Record(number, kind, self._data[begin + RECORD_BYTES : begin + RECORD_BYTES + size], place)

    def take(self, record: Record) -> None:
        """Remove a record, and those before it: the writer may use their memory."""
        self._order()
        self._words[_TAKEN] = record.number
        self._words[_TAIL] = end = record.end
        if self._free is not None:
            end, freed = end // _FREED_BYTES * _FREED_BYTES, self._words[_FREED]
            if end <= freed:
                return
            begin = freed % self._capacity
            # What has wrapped to the beginning is left for the next time around.
            self._free(PAGE_BYTES + begin, min(end - freed, self._capacity - begin))
        self._words[_FREED] = end

    def _order(self) -> None:
        """Let what was stored before be seen before what is stored next, on processors that reorder stores too."""
        self._fence.release()
        self._fence.acquire()


def _padded(size: int) -> int:
    return (size + 7) // 8 * 8
