"""Tallies: what callers use of their limits, counted over all processes of a gateway."""

import contextlib
import fcntl
import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Self

MOST_PROCESSES = 64
TOTAL = b"total"
"""The name of the tally of all open requests."""
_BUCKET = struct.Struct("<dd")
_COUNT = struct.Struct("<II")
_NAME_BYTES = 32
_OPEN_AT = _NAME_BYTES + _BUCKET.size
_RECORD_BYTES = _OPEN_AT + MOST_PROCESSES * _COUNT.size
_RECORDS = 2**17
"""Many times as many as a file of keys may have: a record is never freed, and a key may be replaced every day."""
_HEAD_BYTES = 4096


class Tally:
    """One caller's open requests and token bucket. Between `__enter__` and `__exit__` no other process changes it."""

    left: float | None = None
    """How many requests the bucket still admitted at `left_at`; None: it was never used."""
    left_at = 0.0
    others = 0
    """How many requests are open in other processes."""

    def __enter__(self) -> Self:
        """Begin a change."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""

    def publish(self, count: int) -> None:
        """Tell the other processes how many requests are open in this one."""


class SharedTallies:
    """The tallies of all processes of a gateway, in a file without a name that they map into their memory.

    A lock on a record ends with the process that held it, and the counts of a process that ended count no more.
    """

    def __init__(self, descriptor: int | None = None, place: int = 0) -> None:
        """Take the file's descriptor and this process's place among all; without a descriptor, make the file."""
        self._file = _made() if descriptor is None else descriptor
        self._memory = mmap.mmap(self._file, _HEAD_BYTES + _RECORDS * _RECORD_BYTES)
        self._place = place
        self._life = self._lives()[place]

    @property
    def descriptor(self) -> int:
        """The file, for the processes that inherit it."""
        return self._file

    def of(self, name: bytes) -> Tally:
        """Return the tally of a name, the same in all processes."""
        digest = sha256(name).digest()
        record = int.from_bytes(digest[:8], "little") % _RECORDS
        with _locked(self._file, 0, _HEAD_BYTES):
            for _ in range(_RECORDS):
                at = _HEAD_BYTES + record * _RECORD_BYTES
                found = self._memory[at : at + _NAME_BYTES]
                if found == digest:
                    break
                if not any(found):
                    self._memory[at : at + _NAME_BYTES] = digest
                    break
                record = (record + 1) % _RECORDS
            else:
                raise RuntimeError(f"tallies: at most {_RECORDS} keys in the life of a gateway: restart it")
        return _SharedTally(self._file, self._memory, at, self._place, self._life, self._lives)

    def forget(self, place: int) -> None:
        """Count the open requests of a process no more: it has ended. Another may take its place."""
        struct.pack_into("<I", self._memory, 4 * place, self._lives()[place] + 1)

    def close(self) -> None:
        """Close the file."""
        self._memory.close()
        os.close(self._file)

    def _lives(self) -> tuple[int, ...]:
        """Return how many processes have ended in each place."""
        return struct.unpack_from(f"<{MOST_PROCESSES}I", self._memory, 0)


class _SharedTally(Tally):
    def __init__(  # noqa: PLR0913, PLR0917 - made in one place
        self, file: int, memory: mmap.mmap, at: int, place: int, life: int, lives: Callable[[], tuple[int, ...]]
    ) -> None:
        self._file = file
        self._memory = memory
        self._at = at
        self._place = place
        self._life = life
        self._lives = lives
        self._lock = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._lock.enter_context(_locked(self._file, self._at, _RECORD_BYTES))
        self.left, self.left_at = _BUCKET.unpack_from(self._memory, self._at + _NAME_BYTES)
        if not self.left_at:
            self.left = None
        counts = struct.unpack_from(f"<{2 * MOST_PROCESSES}I", self._memory, self._at + _OPEN_AT)
        alive = zip(self._lives(), counts[0::2], counts[1::2], strict=True)
        self.others = sum(
            count for place, (life, of, count) in enumerate(alive) if of == life and place != self._place
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        if self.left is not None:
            _BUCKET.pack_into(self._memory, self._at + _NAME_BYTES, self.left, self.left_at)
        self._lock.close()

    def publish(self, count: int) -> None:
        _COUNT.pack_into(self._memory, self._at + _OPEN_AT + self._place * _COUNT.size, self._life, count)


def _made() -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("tokenbus-tallies")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, _HEAD_BYTES + _RECORDS * _RECORD_BYTES)
    return descriptor


@contextlib.contextmanager
def _locked(file: int, at: int, size: int) -> Iterator[None]:
    """Lock a part of the file against other processes; within one, its event loop keeps the order."""
    fcntl.lockf(file, fcntl.LOCK_EX, size, at)
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN, size, at)
