"""SharedMemory: memory that an engine's process and its publisher's process share until both have ended."""

import contextlib
import mmap
import os
from functools import partial

from tokenbus.settings import Settings
from tokenbus.worker.process.journal import DROPPED_BYTES, JOURNAL_BYTES
from tokenbus.worker.process.records import Word
from tokenbus.worker.process.ring import PAGE_BYTES, Ring, ring_bytes

_JOURNAL = 2  # index of the journal's ring


class SharedMemory:
    """The file from `shared_file`, mapped in one of the two processes."""

    def __init__(self, file: int, settings: Settings) -> None:
        self._settings = settings
        self._mapped = mmap.mmap(file, _size(settings))
        memory, begin = memoryview(self._mapped), PAGE_BYTES
        self.words = memory[: 8 * len(Word)].cast("Q")
        rings: list[Ring] = []
        for size, items in _rings(settings):
            # The ring of steps keeps its pages, because new pages cost the engine's thread much time.
            # The ring of requests keeps its pages, because a new publisher reads requests that were already taken.
            free = partial(_free, self._mapped, begin) if len(rings) == _JOURNAL else None
            rings.append(Ring(memory[begin : begin + size], items, free))
            begin += size
        self.steps, self.requests, self.journal = rings
        """Rings of records from the engine, of records for the engine, and of unacknowledged items."""

    def warm(self) -> None:
        """Touch the pages of the ring of steps, so that the first steps need no new pages."""
        (size, _), *_ = _rings(self._settings)
        self._mapped[PAGE_BYTES : PAGE_BYTES + size] = bytes(size)


def _free(mapped: mmap.mmap, ring: int, begin: int, size: int) -> None:
    """Return empty pages of a ring to the system. A later write gets zeroed pages."""
    with contextlib.suppress(OSError):  # some kernels cannot free these pages
        mapped.madvise(mmap.MADV_REMOVE, ring + begin, size)


def shared_file(settings: Settings) -> int:
    """Return a new file in memory, which disappears when the last process closes the file."""
    file = os.memfd_create("tokenbus-publisher", os.MFD_CLOEXEC)
    os.ftruncate(file, _size(settings))
    return file


def _rings(settings: Settings) -> list[tuple[int, int]]:
    worker, most = settings.worker, settings.limits.max_message_bytes
    items = worker.most_items
    kept = worker.retention_bytes + items * JOURNAL_BYTES + DROPPED_BYTES
    requests = max(1, 2 * worker.max_requests) + worker.handover_items
    return [
        (ring_bytes(size, most_items, largest), most_items)
        for size, most_items, largest in (
            (worker.handover_bytes, worker.handover_items, worker.handover_bytes),
            (worker.handover_bytes, requests, most),
            (kept, items + 1, most + JOURNAL_BYTES + DROPPED_BYTES),
        )
    ]


def _size(settings: Settings) -> int:
    return PAGE_BYTES + sum(size for size, _ in _rings(settings))
