"""JournaledRetention: retention in shared memory, which the next publisher takes over."""

import struct
from collections.abc import Iterable
from typing import cast

import numpy as np

from tokenbus.worker.process.records import Word
from tokenbus.worker.process.ring import Record, Ring
from tokenbus.worker.retention import Retained, Retention
from tokenbus_contracts.generated.stream_pb2 import PayloadKind

_ENTRY = struct.Struct("<QQQQ")
"""Words of an entry: first sequence; last sequence and count of request ids; record number; item number in the record.

When a run grows, only one word changes, so a publisher that dies leaves either the old entry or the new entry.
"""
JOURNAL_BYTES = _ENTRY.size
DROPPED_BYTES = 2**20
"""Maximum bytes for runs of lost items. Beyond this limit, the requests of lost items are not named."""
_DROPPED = 255  # the kind of an entry for a run of lost items; the kind of all other entries is a PayloadKind
_LAST = slice(8, 16)
_COUNT_BITS = 20  # the lower bits of a word hold a count, and the upper bits hold a sequence or a record number


class JournaledRetention(Retention):
    """Retention that a new publisher takes over, together with the stream's sequence.

    A publisher may die after retaining only some items of an engine's record. The next publisher then makes all items
    of that record again, and skips the retained items.
    """

    def __init__(self, max_items: int, max_bytes: int, *, checksum: bool, journal: Ring, words: memoryview) -> None:
        super().__init__(max_items, max_bytes, checksum=checksum)
        self._journal, self._words = journal, words
        self._record = self._made = self._known = 0
        """Current record, number of items made from it, and number of items that an earlier publisher retained."""
        self._run: Record | None = None  # the last entry, if this entry is a run that may grow
        self._dropped_bytes = 0  # total bytes of all runs
        made = divmod(words[Word.EMITTED], 1 << _COUNT_BITS)
        self.next_sequence = max(1, words[Word.NEXT_SEQUENCE])
        for entry in journal.waiting():
            first, span, record, index = _ENTRY.unpack_from(entry.data)
            last, ids = divmod(span, 1 << _COUNT_BITS)
            self._restore(entry, first, last, ids)
            self.next_sequence = last + 1
            made = max(made, (record, index))
        self._made_before = made

    def _restore(self, entry: Record, first: int, last: int, ids: int) -> None:
        rest = entry.data[JOURNAL_BYTES:]
        if entry.kind == _DROPPED:
            self._dropped_bytes += len(entry.data)
            self._run = entry
            self._add_dropped(first, last, frozenset(np.frombuffer(rest, np.uint64, ids).tolist()))
            return
        self._run = None
        self._entries.append(Retained(first, cast("PayloadKind", entry.kind), bytes(rest), self._checksum))
        self.bytes += len(rest)

    def begin(self, record: int) -> None:
        """Count the next items as items of the engine's record number `record`, or of no record if the number is 0."""
        number, made = self._made_before
        self._record, self._made = record, 0
        self._known = made if record and record == number else 0

    def has_room(self, size: int, items: int = 1) -> bool:
        """Return whether `items` items of `size` bytes in total fit, or an earlier publisher has retained them."""
        return self._is_known or super().has_room(size, items)

    def keep(self, kind: PayloadKind, payload: bytes) -> Retained:
        is_known = self._is_known
        self._made += 1
        if is_known:
            return Retained(self.next_sequence - 1, kind, payload, self._checksum)
        entry = _ENTRY.pack(self.next_sequence, self.next_sequence << _COUNT_BITS, self._record, self._made)
        self._journal.put(kind, entry, payload)
        self._run = None
        kept = super().keep(kind, payload)
        self._note()
        return kept

    def drop(self, request_ids: Iterable[int]) -> None:
        """Use the next sequence for a lost item. Its request ids are stored unless the journal is full."""
        self._made += 1
        if self._made <= self._known:
            return
        lost = list(request_ids)
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
        super().restart()
        if entries := list(self._journal.waiting()):
            self._journal.take(entries[-1])
        self._run, self._dropped_bytes, self._known = None, 0, 0
        self._note()

    @property
    def _is_known(self) -> bool:
        return self._made < self._known

    def _note(self) -> None:
        """Store the progress. The caller holds the lock, so that no ack is handled before the progress is stored."""
        self._words[Word.EMITTED] = self._record << _COUNT_BITS | self._made
        self._words[Word.NEXT_SEQUENCE] = self.next_sequence
