"""Files that a command writes and running processes read again: locked, replaced as a whole, and watched."""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_RETRY_SECONDS = 1.0


class WatchedFiles:
    """Has files read again when they have changed; whether they have, the file system says."""

    def __init__(self, paths: Sequence[Path], now: Callable[[], float] = time.monotonic) -> None:
        self._paths = paths
        self._now = now
        self._known = self._states()
        self._retry_at = 0.0
        self.is_unread = False
        """Whether a file has changed and could not be read: what was read before stays in force."""

    def refresh(self, read: Callable[[], object]) -> bool:
        """Read the files again if they have changed, and return whether they were; raises what reading raises.

        What could not be read is read again a second later: too many open files, say, are no change of the file.
        """
        is_due = self.is_unread and self._now() >= self._retry_at
        before, self._known = self._known, self._states()
        if self._known == before and not is_due:
            return False
        self.is_unread = True
        self._retry_at = self._now() + _RETRY_SECONDS
        read()
        self.is_unread = False
        return True

    def _states(self) -> list[tuple[int, ...] | None]:
        return [_state(path) for path in self._paths]


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def replace_file(path: Path, text: str, mode: int) -> None:
    """Replace a file's contents, atomically and durably."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink()
        raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes from changing a file meanwhile."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
