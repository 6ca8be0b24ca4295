"""Ring: a queue of records in shared memory, from a writing process to a reading process.

A record stays until the reader takes the record, even if a process dies meanwhile. A record becomes visible when the
writer stores its new position, which is a single word.
"""

import struct
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

_HEAD, _TAIL, _TAKEN, _FREED, _WRITTEN = range(5)
PAGE_BYTES = 4096
"""Bytes before the records. The first words are the writer's position, the reader's position, the number of records
taken, the position up to which the memory is free, and the number of records written."""
_RECORD = struct.Struct("<QII")  # a record's number (the first is 1), length and kind
RECORD_BYTES = _RECORD.size
_FREED_BYTES = 2**20  # memory is freed in blocks of this number of bytes
_SKIP = 0  # the kind of a filler record, at the end of the memory, where the next record does not fit


class Record(NamedTuple):
    """A record in the ring, whose bytes are valid until the record is taken."""

    number: int
    kind: int
    data: memoryview
    end: int
    """Position of the reader after the reader has taken the record."""


def ring_bytes(size: int, items: int, largest: int) -> int:
    """Return the size in bytes of a ring for `items` records of `size` bytes in total, rounded up to pages."""
    needed = _padded(size) + _padded(largest) + (items + 1) * (RECORD_BYTES + 8) + _FREED_BYTES
    return PAGE_BYTES * (2 + needed // PAGE_BYTES)


class Ring:
    """A bounded queue of records. One thread at a time may use each side."""

    def __init__(self, memory: memoryview, most: int, free: Callable[[int, int], None] | None = None) -> None:
        """Open a ring for at most `most` records in memory that was initially zero.

        After taking records, the reader calls `free` with the start and the length of the empty memory.
        """
        self._words = memory[: 5 * 8].cast("Q")
        self._data = memory[PAGE_BYTES:]
        self._capacity = len(self._data)
        self._most = most
        self._free = free
        self._fence = threading.Lock()
        self._fence.acquire()
        self._begin = 0
        self._position = self._words[_HEAD]
        # Read the waiting records before `taken`, because the reader may take records between the two reads.
        self._written = max([*(record.number for record in self.waiting()), self.taken])

    # Methods of the writer's side.

    def __len__(self) -> int:
        """Return the number of written records that the reader has not taken."""
        return self._written - self.taken

    def has_room(self, size: int) -> bool:
        return len(self) < self._most and self._fits(size)

    def room(self, size: int) -> memoryview:
        """Return the memory of the next record, which must fit. The caller fills this memory and calls `commit`."""
        begin = self._begin = self._next_begin(size)
        return self._data[begin + RECORD_BYTES : begin + RECORD_BYTES + size]

    def commit(self, kind: int, size: int) -> int:
        """Publish the filled record to the other side, and return its number."""
        begin, position = self._begin, self._position
        if begin != (end := position % self._capacity):
            if end + RECORD_BYTES <= self._capacity:
                _RECORD.pack_into(self._data, end, 0, 0, _SKIP)
            position += self._capacity - end
        number = self._written + 1
        _RECORD.pack_into(self._data, begin, number, size, kind)
        position += RECORD_BYTES + _padded(size)
        self._position, self._written = position, number
        self._order()
        self._words[_WRITTEN] = number
        self._words[_HEAD] = position
        return number

    def put(self, kind: int, *parts: bytes | memoryview) -> int:
        """Write a record, which must fit, and return its number."""
        size = sum(map(len, parts))
        room, at = self.room(size), 0
        for part in parts:
            room[at : at + len(part)] = part
            at += len(part)
        return self.commit(kind, size)

    def _next_begin(self, size: int) -> int:
        begin = self._position % self._capacity
        return begin if begin + RECORD_BYTES + _padded(size) <= self._capacity else 0

    def _fits(self, size: int) -> bool:
        used, needed = self._position - self._words[_FREED], RECORD_BYTES + _padded(size)
        skipped = 0 if self._next_begin(size) else -self._position % self._capacity
        return used + skipped + needed <= self._capacity

    # Methods of the reader's side.

    @property
    def taken(self) -> int:
        """Number of records taken, which is also the number of the last taken record."""
        return self._words[_TAKEN]

    @property
    def tail(self) -> int:
        return self._words[_TAIL]

    @property
    def is_empty(self) -> bool:
        return self._words[_HEAD] == self._words[_TAIL] or self.next() is None

    @property
    def waiting_count(self) -> int:
        return self._words[_WRITTEN] - self._words[_TAKEN]

    def next(self) -> Record | None:
        return next(self.waiting(), None)

    def waiting(self, since: int | None = None) -> Iterator[Record]:
        """Return the waiting records, or all records after an earlier position of the reader, oldest first."""
        position, head, taken = self.tail if since is None else since, self._words[_HEAD], self.taken
        self._order()
        while position < head:
            begin, number, size, kind = position % self._capacity, 0, 0, _SKIP
            if begin + RECORD_BYTES <= self._capacity:
                number, size, kind = _RECORD.unpack_from(self._data, begin)
            if kind == _SKIP:
                position += self._capacity - begin
                continue
            position += RECORD_BYTES + _padded(size)
            if number > taken or since is not None:  # a reader may die after storing TAKEN and before storing TAIL
                yield Record(number, kind, self._data[begin + RECORD_BYTES : begin + RECORD_BYTES + size], position)

    def take(self, record: Record) -> None:
        """Remove a record and all earlier records, whose memory the writer may then reuse."""
        self._order()
        self._words[_TAKEN] = record.number
        self._words[_TAIL] = end = record.end
        if self._free is not None:
            end, freed = end // _FREED_BYTES * _FREED_BYTES, self._words[_FREED]
            if end <= freed:
                return
            begin = freed % self._capacity
            # Free memory only up to the end of the ring. A later call frees the rest.
            self._free(PAGE_BYTES + begin, min(end - freed, self._capacity - begin))
        self._words[_FREED] = end

    def _order(self) -> None:
        """Make earlier stores visible before later stores, even on processors that reorder stores."""
        self._fence.release()
        self._fence.acquire()


def _padded(size: int) -> int:
    return (size + 7) // 8 * 8
