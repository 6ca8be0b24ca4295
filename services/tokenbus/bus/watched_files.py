"""Files that a command writes and running processes reload, with locking and atomic replacement."""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_RETRY_SECONDS = 1.0


class WatchedFiles:
    """Reloads files when the size, a time or the inode of a file changes."""

    def __init__(self, paths: Sequence[Path], now: Callable[[], float] = time.monotonic) -> None:
        self._paths = paths
        self._now = now
        self._known = [_state(path) for path in paths]
        self._retry_at = 0.0
        self.is_unread = False
        """Whether a changed file could not be read, so that its previous contents stay in force."""

    def refresh(self, read: Callable[[], object]) -> bool:
        """Call `read` if a file has changed, and return whether `read` was called; errors of `read` are raised.

        After an error, `read` is called again a second later, because an error such as too many open files does not
        change the file.
        """
        is_due = self.is_unread and self._now() >= self._retry_at
        before, self._known = self._known, [_state(path) for path in self._paths]
        if self._known == before and not is_due:
            return False
        self.is_unread = True
        self._retry_at = self._now() + _RETRY_SECONDS
        read()
        self.is_unread = False
        return True


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def replace_file(path: Path, text: str, mode: int) -> None:
    """Replace a file atomically and durably."""
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
    """Lock a file's folder during `with`, so that other processes that use this lock do not change the file."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
