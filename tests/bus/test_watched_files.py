"""Watched files are read again when they have changed, and until they could be read."""

import errno
from pathlib import Path

import pytest

from tokenbus.bus.watched_files import WatchedFiles
from tokenbus.testing import ManualClock


class _File:
    """A file and what was read of it, while reading may fail as it does where too many files are open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fails = False
        self.tries = 0
        self.found = ""

    def read(self) -> None:
        self.tries += 1
        if self.fails:
            raise OSError(errno.EMFILE, "too many open files")
        self.found = self.path.read_text()


def test_file_whose_reading_failed_once_is_read_later_though_it_has_not_changed_again(tmp_path: Path) -> None:
    """A failure that passes by itself costs a second, and the file is not read more often than that meanwhile."""
    path, clock = tmp_path / "file", ManualClock()
    path.write_text("first")
    file, watched = _File(path), WatchedFiles([path], clock.now)
    assert not watched.refresh(file.read)
    path.write_text("second")
    file.fails = True
    for _ in range(3):
        with pytest.raises(OSError, match="too many open files"):
            watched.refresh(file.read)
        assert not watched.refresh(file.read)
        assert watched.is_unread
        clock.advance(1)
    assert file.tries == 3
    file.fails = False
    assert watched.refresh(file.read)
    assert (file.found, watched.is_unread) == ("second", False)
    assert not watched.refresh(file.read)


def test_file_that_is_mended_is_read_at_once(tmp_path: Path) -> None:
    path, clock = tmp_path / "file", ManualClock()
    path.write_text("first")
    file, watched = _File(path), WatchedFiles([path], clock.now)
    path.write_text("broken")
    file.fails = True
    with pytest.raises(OSError, match="too many open files"):
        watched.refresh(file.read)
    file.fails = False
    path.write_text("mended")
    assert watched.refresh(file.read)
    assert file.found == "mended"
