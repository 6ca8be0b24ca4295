"""WatchedFiles: tells when files that are read while the gateway runs have changed."""

from collections.abc import Sequence
from pathlib import Path


class WatchedFiles:
    """Looks at what the file system says of them: no file is opened."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Take the files, as they are now."""
        self._paths = paths
        self._known = self._look()

    def changed(self) -> bool:
        """Tell whether one of them is another one than the last time."""
        before, self._known = self._known, self._look()
        return self._known != before

    def _look(self) -> list[tuple[int, ...] | None]:
        return [_state(path) for path in self._paths]


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
