"""RuntimeFolder: a private folder for a system's sockets, which is gone afterwards, or at the latest with the next."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenbus_services.cli.errors import CommandError
from tokenbus_services.printable import printable

_PREFIX = "tokenbus-"
_LOCK = "lock"
_LONGEST = 60
"""A socket's path has at most 107 bytes on Linux and 103 elsewhere; what comes behind the folder needs the rest."""


class RuntimeFolder(NamedTuple):
    """A folder that only this user can enter; its lock is held as long as any process of the system lives."""

    path: Path
    lock: int
    """The descriptor that child processes are to inherit."""


@contextlib.contextmanager
def runtime_folder(base: Path | None = None) -> Iterator[RuntimeFolder]:
    """Remove what systems left that were killed, and make a folder for as long as `with` lasts.

    It is made in XDG_RUNTIME_DIR, else TMPDIR, else /tmp, whichever takes it, unless `base` says where.
    """
    path = _made([base] if base else _bases())
    made = path / "new"
    lock = os.open(made, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        made.rename(path / _LOCK)  # from now on it can be seen, and never without its lock
        yield RuntimeFolder(path, lock)
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _made(bases: Sequence[Path]) -> Path:
    """Return a new folder in the first place that takes one, of which not even root can be sure before."""
    refusals = []
    for base in bases:
        _sweep(base)
        try:
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        except OSError as error:
            refusals.append(printable(f"{base}: {(error.strerror or str(error)).lower()}"))
    raise CommandError(f"no place for a folder of sockets (XDG_RUNTIME_DIR, TMPDIR): {', '.join(refusals)}")


def _bases() -> list[Path]:
    named = [os.environ.get(name) for name in ("XDG_RUNTIME_DIR", "TMPDIR")]
    short = [Path(name).absolute() for name in named if name and len(os.fsencode(Path(name).absolute())) <= _LONGEST]
    return [*short, Path("/tmp")]  # noqa: S108 - mkdtemp makes a private folder in it


def _sweep(base: Path) -> None:
    for left in base.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # another user's, or in use
            _remove_unless_locked(left)


def _remove_unless_locked(lock: Path) -> None:
    if lock.stat().st_uid != os.getuid():
        return
    descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.parent, ignore_errors=True)
    finally:
        os.close(descriptor)
