"""JournaledRetention: what a publisher keeps until it is acknowledged, written where the next publisher finds it."""

import struct
from collections.abc import Iterable
from typing import cast

import numpy as np

from tokenbus.worker.process.records import Word
from tokenbus.worker.process.ring import Record, Ring
from tokenbus.worker.retention import Dropped, Retained, Retention
from tokenbus_contracts.generated.stream_pb2 import PayloadKind

_ENTRY = struct.Struct("<QQQQ")
"""Its first sequence, its last with how many ids follow, of which handed-over record it was made, and as which of that.

What changes of a run that grows is one word, so that a publisher that dies leaves it as it was or as it was to be.
"""
JOURNAL_BYTES = _ENTRY.size
DROPPED_BYTES = 2**20
"""The room for what found none, with the ids of its requests; beyond it they are not named."""
_DROPPED = 255
"""The kind of a run of items that found no room; the others' is their PayloadKind."""
_LAST = slice(8, 16)
_COUNT_BITS = 20
"""The lower bits of a word hold a count, the upper bits a larger number."""


class JournaledRetention(Retention):
    """Retention that a new publisher takes over, with the stream's sequence.

    When a publisher dies, what it made of a record may be kept in part. The next one makes it again, and what is kept
    already is not kept twice.
    """

    def __init__(self, max_items: int, max_bytes: int, *, checksum: bool, journal: Ring, words: memoryview) -> None:
        super().__init__(max_items, max_bytes, checksum=checksum)
        self._journal, self._words = journal, words
        self._record = self._made = self._known = 0
        """The record that items are made of now, how many were made of it, and how many of these are kept already."""
        self._run: Record | None = None
        """The journal's entry of a run that may grow: the last one."""
        self._dropped_bytes = 0
        """How much of their room such entries take."""
        made = divmod(words[Word.EMITTED], 1 << _COUNT_BITS)
        self.next_sequence = max(1, words[Word.NEXT_SEQUENCE])
        for entry in journal.waiting():
            first, span, record, place = _ENTRY.unpack_from(entry.data)
            last, ids = divmod(span, 1 << _COUNT_BITS)
            self._restore(entry, first, last, ids)
            self.next_sequence = last + 1
            made = max(made, (record, place))
        self._made_before = made

    def _restore(self, entry: Record, first: int, last: int, ids: int) -> None:
        rest = entry.data[JOURNAL_BYTES:]
        if entry.kind == _DROPPED:
            keys = frozenset(np.frombuffer(rest, np.uint64, ids).tolist())
            self._dropped_bytes += len(entry.data)
            self._run = entry
            before = self._kept[-1] if self._kept else None
            if isinstance(before, Dropped):
                first, keys = before.sequence, keys | before.keys if keys and before.keys else frozenset()
                self._kept.pop()
            self._kept.append(Dropped(first, last, keys))
            return
        self._run = None
        self._kept.append(Retained(first, cast("PayloadKind", entry.kind), bytes(rest), self._checksum))
        self.bytes += len(rest)

    def begin(self, record: int) -> None:
        """Begin with what is made of a record that was handed over; 0: of none."""
        number, made = self._made_before
        self._record, self._made = record, 0
        self._known = made if record and record == number else 0

    def has_room(self, size: int, items: int = 1) -> bool:
        """Tell whether items of that size fit, or are kept already."""
        return self._is_known or super().has_room(size, items)

    def keep(self, kind: PayloadKind, payload: bytes) -> Retained:
        """Keep an item under the next sequence; the caller has checked `has_room`."""
        if self._is_known:
            self._made += 1
            return Retained(self.next_sequence - 1, kind, payload, self._checksum)
        self._made += 1
        entry = _ENTRY.pack(self.next_sequence, self.next_sequence << _COUNT_BITS, self._record, self._made)
        self._journal.put(kind, entry, payload)
        self._run = None
        kept = super().keep(kind, payload)
        self._note()
        return kept

    def drop(self, keys: Iterable[int]) -> None:
        """Use the next sequence for an item that is not kept; a new publisher knows its ids as far as there is room."""
        self._made += 1
        if self._made <= self._known:
            return
        lost = list(keys)
        ids = np.array(lost, np.uint64)
        has_room = self._dropped_bytes + JOURNAL_BYTES + ids.nbytes <= DROPPED_BYTES
        if self._run is None or has_room:
            ids = ids if has_room else ids[:0]
            self._dropped_bytes += JOURNAL_BYTES + ids.nbytes
            span = self.next_sequence << _COUNT_BITS | ids.size
            entry = _ENTRY.pack(self.next_sequence, span, self._record, self._made)
            self._journal.put(_DROPPED, entry, ids.tobytes())
            *_, self._run = self._journal.waiting()
        else:
            self._run.data[_LAST] = (self.next_sequence << _COUNT_BITS).to_bytes(8, "little")
        super().drop(lost)
        self._note()

    def acknowledge(self, through: int) -> bool:
        """Remove all entries up to a sequence; tell whether that made room."""
        has_room = super().acknowledge(through)
        gone = None
        for entry in self._journal.waiting():
            if _ENTRY.unpack_from(entry.data)[1] >> _COUNT_BITS >= self.first_sequence:
                break
            gone = entry
            self._dropped_bytes -= len(entry.data) if entry.kind == _DROPPED else 0
        if gone is not None:
            self._journal.take(gone)
            if self._run is not None and self._run.number <= gone.number:
                self._run = None
        return has_room

    def restart(self) -> None:
        """Drop all entries, and count from one again."""
        super().restart()
        if entries := list(self._journal.waiting()):
            self._journal.take(entries[-1])
        self._run, self._dropped_bytes, self._known = None, 0, 0
        self._note()

    @property
    def _is_known(self) -> bool:
        return self._made < self._known

    def _note(self) -> None:
        """Write down how far it is; the same lock that is held here keeps an acknowledgement away until then."""
        self._words[Word.EMITTED] = self._record << _COUNT_BITS | self._made
        self._words[Word.NEXT_SEQUENCE] = self.next_sequence
