"""WatchedFiles: tells when files that a running process reads again have changed."""

from collections.abc import Sequence
from pathlib import Path


class WatchedFiles:
    """Compares what the file system says of the files; opens none."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Take the files in their present state."""
        self._paths = paths
        self._known = self._states()

    def changed(self) -> bool:
        """Return whether a file has changed since the last call."""
        before, self._known = self._known, self._states()
        return self._known != before

    def _states(self) -> list[tuple[int, ...] | None]:
        return [_state(path) for path in self._paths]


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
