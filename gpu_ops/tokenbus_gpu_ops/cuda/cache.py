"""Compiled kernels on disk: one file for each source, compiler and card, in the user's own cache."""

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

VARIABLE = "TOKENBUS_CACHE_DIR"


def folder() -> Path:
    """Return where compiled kernels are kept; nothing is made yet."""
    own = os.environ.get(VARIABLE)
    if own:
        return Path(own) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME")
    # The specification wants relative paths ignored.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "tokenbus" / "kernels"


def key_of(*parts: str | bytes) -> str:
    """Return a name for what was made of these parts, and of nothing else."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()[:32]


def load(name: str) -> bytes | None:
    """Return a kernel that was kept; None if there is none, or not all of it."""
    try:
        data = (folder() / name).read_bytes()
    except OSError:
        return None
    digest, kernel = data[:32], data[32:]
    return kernel if hashlib.sha256(kernel).digest() == digest else None


def keep(name: str, kernel: bytes) -> None:
    """Keep a kernel for the next process. A folder that cannot be written costs that process a compilation, no more."""
    with contextlib.suppress(OSError):
        where = folder()
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=where, prefix=f".{name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(kernel).digest() + kernel)
            Path(temporary).replace(where / name)  # atomically, also where another process writes it
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
