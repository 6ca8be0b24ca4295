"""Files that a command writes and running processes reload: locked, replaced as a whole, and watched."""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_RETRY_SECONDS = 1.0


class WatchedFiles:
    """Reloads files when their size, times or inode change."""

    def __init__(self, paths: Sequence[Path], now: Callable[[], float] = time.monotonic) -> None:
        self._paths = paths
        self._now = now
        self._known = [_state(path) for path in paths]
        self._retry_at = 0.0
        self.is_unread = False
        """Whether a file has changed and could not be read: the earlier contents stay in force."""

    def refresh(self, read: Callable[[], object]) -> bool:
        """Call `read` if the files have changed, and return whether they were read; raises the errors of `read`.

        After an error this tries again a second later: too many open files, for example, do not change the file.
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
    """Keep other processes from changing a file during `with`."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
