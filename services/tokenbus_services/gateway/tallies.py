"""Tallies: what callers use of their limits, counted over all processes of a gateway."""

import fcntl
import mmap
import os
import struct
import tempfile
from hashlib import sha256
from typing import Self

MOST_PROCESSES = 64
TOTAL, CONNECTIONS = b"total", b"connections"
"""The names of the tallies of all open requests and connections."""
_BUCKET = struct.Struct("<dd")
_COUNT = struct.Struct("<II")
_NAME_BYTES = 32
_OPEN_AT = _NAME_BYTES + _BUCKET.size
_RECORD_BYTES = _OPEN_AT + MOST_PROCESSES * _COUNT.size
_RECORDS = 2**17
"""Many times as many as a file of keys may have: a record is never freed, and a key may be replaced every day."""
_HEAD_BYTES = 4096


class Tally:
    """One caller's open requests and token bucket. Within `with` no other process changes the bucket."""

    left: float | None = None
    """How many requests the bucket still admitted at `left_at`; None: it was never used."""
    left_at = 0.0

    def __enter__(self) -> Self:
        """Begin a change."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the change."""

    @property
    def others(self) -> int:
        """How many requests are open in other processes."""
        return 0

    def publish(self, count: int) -> None:
        """Show the other processes how many requests are open in this one."""


class SharedTallies:
    """The tallies of all processes of a gateway, in a file without a name that they map into their memory.

    A lock on a record ends with the process that held it, and the counts of a process that ended count no more.
    """

    def __init__(self, descriptor: int | None = None, place: int = 0) -> None:
        """Map the file of a descriptor, or a new one; `place` is this process's among all."""
        self.descriptor = _made() if descriptor is None else descriptor
        self.memory = mmap.mmap(self.descriptor, _HEAD_BYTES + _RECORDS * _RECORD_BYTES)
        self.place = place
        self.life = self.lives()[place]

    def of(self, name: bytes) -> Tally:
        """Return the tally of a name, the same in all processes."""
        digest = sha256(name).digest()
        first = int.from_bytes(digest[:8], "little")
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX, _HEAD_BYTES)
        try:
            for record in range(first, first + _RECORDS):
                at = _HEAD_BYTES + record % _RECORDS * _RECORD_BYTES
                found = self.memory[at : at + _NAME_BYTES]
                if found == digest or not any(found):
                    self.memory[at : at + _NAME_BYTES] = digest
                    return _SharedTally(self, at)
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN, _HEAD_BYTES)
        raise RuntimeError(f"tallies: at most {_RECORDS} keys in the life of a gateway: restart it")

    def lives(self) -> tuple[int, ...]:
        """Return how many processes have ended in each place."""
        return struct.unpack_from(f"<{MOST_PROCESSES}I", self.memory, 0)

    def forget(self, place: int) -> None:
        """Count the open requests of a process no more: it has ended. Another may take its place."""
        struct.pack_into("<I", self.memory, 4 * place, self.lives()[place] + 1)

    def close(self) -> None:
        """Close the file."""
        self.memory.close()
        os.close(self.descriptor)


class _SharedTally(Tally):
    def __init__(self, all_tallies: SharedTallies, at: int) -> None:
        self._all = all_tallies
        self._at = at

    def __enter__(self) -> Self:
        fcntl.lockf(self._all.descriptor, fcntl.LOCK_EX, _RECORD_BYTES, self._at)
        self.left, self.left_at = _BUCKET.unpack_from(self._all.memory, self._at + _NAME_BYTES)
        if not self.left_at:
            self.left = None
        return self

    def __exit__(self, *_: object) -> None:
        if self.left is not None:
            _BUCKET.pack_into(self._all.memory, self._at + _NAME_BYTES, self.left, self.left_at)
        fcntl.lockf(self._all.descriptor, fcntl.LOCK_UN, _RECORD_BYTES, self._at)

    @property
    def others(self) -> int:
        counts = struct.unpack_from(f"<{2 * MOST_PROCESSES}I", self._all.memory, self._at + _OPEN_AT)
        alive = enumerate(zip(self._all.lives(), counts[0::2], counts[1::2], strict=True))
        return sum(count for place, (life, of, count) in alive if of == life and place != self._all.place)

    def publish(self, count: int) -> None:
        at = self._at + _OPEN_AT + self._all.place * _COUNT.size
        _COUNT.pack_into(self._all.memory, at, self._all.life, count)


def _made() -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("tokenbus-tallies")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, _HEAD_BYTES + _RECORDS * _RECORD_BYTES)
    return descriptor
