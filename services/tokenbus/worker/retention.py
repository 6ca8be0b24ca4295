"""Retention: the unacknowledged items of a worker, bounded in number and bytes."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from zlib import crc32

from tokenbus_contracts.generated.stream_pb2 import PayloadKind

_MAX_REQUEST_IDS = 65_536


@dataclass(slots=True)
class Retained:
    """A published item, which a replay sends with the same bytes."""

    sequence: int
    kind: PayloadKind
    payload: bytes
    has_checksum: bool

    @property
    def checksum(self) -> int | None:
        """CRC-32 of the payload, which the sending thread computes to spare the engine's thread."""
        return crc32(self.payload) if self.has_checksum else None

    @property
    def last_sequence(self) -> int:
        """Always equal to `sequence`, because a retained item is not a run."""
        return self.sequence


@dataclass(slots=True)
class Dropped:
    """A run of items that were lost because retention was full. The requests of these items end with an error."""

    sequence: int
    last_sequence: int
    request_ids: frozenset[int]
    """Requests that lost rows, or an empty set if there are too many to name."""


class Retention:
    """Published items that are not yet acknowledged. The owner must hold a lock, because no method is thread-safe."""

    def __init__(self, max_items: int, max_bytes: int, *, checksum: bool) -> None:
        self._entries: deque[Retained | Dropped] = deque()
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._checksum = checksum
        self.next_sequence = 1
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Retained | Dropped]:
        return iter(self._entries)

    @property
    def first_sequence(self) -> int:
        """Oldest retained sequence, or the next sequence if nothing is retained."""
        return self._entries[0].sequence if self._entries else self.next_sequence

    def has_room(self, size: int, items: int = 1) -> bool:
        """Return whether `items` items of `size` bytes in total fit. One entry is reserved for a `Dropped`."""
        return len(self._entries) + items < self._max_items and self.bytes + size <= self._max_bytes

    def share_used(self) -> float:
        """Return the fill level from 0 to 1, by number of items or by bytes, whichever is higher."""
        return max(len(self._entries) / self._max_items, self.bytes / self._max_bytes)

    def keep(self, kind: PayloadKind, payload: bytes) -> Retained:
        """Retain an item under the next sequence. The caller must have checked `has_room`."""
        item = Retained(self.next_sequence, kind, payload, self._checksum)
        self._entries.append(item)
        self.next_sequence += 1
        self.bytes += len(payload)
        return item

    def drop(self, request_ids: Iterable[int]) -> None:
        """Use the next sequence for a lost item. A lost item always fits, because a run of them is a single entry."""
        self._add_dropped(self.next_sequence, self.next_sequence, frozenset(request_ids))
        self.next_sequence += 1

    def _add_dropped(self, first: int, last: int, lost: frozenset[int]) -> None:
        before = self._entries[-1] if self._entries else None
        if isinstance(before, Dropped):
            # Replace the entry, because a message that is being sent may contain the old entry.
            self._entries.pop()
            first, together = before.sequence, before.request_ids | lost
            is_named = before.request_ids and lost and len(together) <= _MAX_REQUEST_IDS
            lost = together if is_named else frozenset()
        self._entries.append(Dropped(first, last, lost))

    def acknowledge(self, through: int) -> bool:
        """Remove all entries up to a sequence, and return whether any entry was removed."""
        before = len(self._entries)
        while self._entries and self._entries[0].last_sequence <= through:
            gone = self._entries.popleft()
            if isinstance(gone, Retained):
                self.bytes -= len(gone.payload)
        return len(self._entries) < before

    def restart(self) -> None:
        self._entries.clear()
        self.bytes, self.next_sequence = 0, 1

    def find(self, sequence: int) -> Retained | Dropped | None:
        """Return the entry that covers a sequence, or None if the item was acknowledged or is not published yet."""
        if not self._entries or not self.first_sequence <= sequence < self.next_sequence:
            return None
        # An entry's index is its distance from the first sequence, or less if an earlier entry is a run of lost items.
        index = min(sequence - self.first_sequence, len(self._entries) - 1)
        entry = self._entries[index]
        if entry.sequence <= sequence <= entry.last_sequence:
            return entry
        return next(entry for entry in islice(self._entries, index) if entry.last_sequence >= sequence)
