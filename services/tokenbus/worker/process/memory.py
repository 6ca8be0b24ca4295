"""SharedMemory: what an engine's process and its publisher's share, and what stays while one of the two lives."""

import contextlib
import mmap
import os
from functools import partial

from tokenbus.settings import Settings
from tokenbus.worker.process.journal import DROPPED_BYTES, JOURNAL_BYTES
from tokenbus.worker.process.records import Word
from tokenbus.worker.process.ring import PAGE_BYTES, Ring, ring_bytes

_JOURNAL = 2
"""The place of the journal's ring."""


class SharedMemory:
    """One file of memory, as each of the two processes maps it."""

    def __init__(self, file: int, settings: Settings) -> None:
        """Map an open file that `shared_file` made with the same settings."""
        self._settings = settings
        self._mapped = mmap.mmap(file, _size(settings))
        memory, begin = memoryview(self._mapped), PAGE_BYTES
        self.words = memory[: 8 * len(Word)].cast("Q")
        rings: list[Ring] = []
        for size, items in _rings(settings):
            # Steps go through pages that stay: a page that is new costs the engine's thread as much as many arrays. And
            # a new publisher reads requests that the engine has taken already.
            free = partial(_free, self._mapped, begin) if len(rings) == _JOURNAL else None
            rings.append(Ring(memory[begin : begin + size], items, free))
            begin += size
        self.steps, self.requests, self.journal = rings
        """What the engine hands over, what comes for it, and what is published and not acknowledged."""

    def warm(self) -> None:
        """Have the pages there that steps go through, before the first step."""
        (size, _), *_ = _rings(self._settings)
        self._mapped[PAGE_BYTES : PAGE_BYTES + size] = bytes(size)


def _free(mapped: mmap.mmap, ring: int, begin: int, size: int) -> None:
    """Give back pages of a ring that hold nothing any more; they are there again, as zeros, once written to."""
    with contextlib.suppress(OSError):  # a kernel that cannot: they stay
        mapped.madvise(mmap.MADV_REMOVE, ring + begin, size)


def shared_file(settings: Settings) -> int:
    """Return a new file that is memory alone, and gone when the last process that has it ends."""
    file = os.memfd_create("tokenbus-publisher", os.MFD_CLOEXEC)
    os.ftruncate(file, _size(settings))  # no page of it is there before it is written to
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
