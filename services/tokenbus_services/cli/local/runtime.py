"""A private folder for the sockets of a system on this machine."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenbus_services.cli.errors import CommandError
from tokenbus_services.printable import printable

_LONGEST = 60
"""A socket's path has at most 107 bytes on Linux and 103 elsewhere; what comes behind the folder needs the rest."""


@contextmanager
def runtime_folder() -> Iterator[Path]:
    """Yield a new folder that only this user can enter, in XDG_RUNTIME_DIR, else TMPDIR, else /tmp.

    It is removed at the end of `with`. If this process is killed before, its services remove it.
    """
    path = _made()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _made() -> Path:
    """Return a new folder in the first place that takes one, of which not even root can be sure before."""
    refusals = []
    for base in _bases():
        try:
            return Path(tempfile.mkdtemp(prefix="tokenbus-", dir=base))
        except OSError as error:
            refusals.append(printable(f"{base}: {(error.strerror or str(error)).lower()}"))
    raise CommandError(f"no place for a folder of sockets (XDG_RUNTIME_DIR, TMPDIR): {', '.join(refusals)}")


def _bases() -> list[Path]:
    named = [os.environ.get(name) for name in ("XDG_RUNTIME_DIR", "TMPDIR")]
    short = [Path(name).absolute() for name in named if name and len(os.fsencode(Path(name).absolute())) <= _LONGEST]
    return [*short, Path("/tmp")]  # noqa: S108 - mkdtemp makes a private folder in it
