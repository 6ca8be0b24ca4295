"""Opens a compiled library, if it was compiled from the source beside it."""

import ctypes
import zlib
from pathlib import Path


class LibraryError(Exception):
    """The library cannot be used; the message says why."""


def open_library(library: Path, source: Path) -> ctypes.PyDLL:
    """Return the library, or raise a LibraryError.

    Its functions are called with the GIL held: they take microseconds, and giving the GIL away and back costs as much.
    """
    if not library.exists():
        raise LibraryError(f"there is no {library.name}: no C compiler was found when Tokenbus was installed")
    try:
        opened = ctypes.PyDLL(str(library))
        compiled_from = ctypes.c_uint32.in_dll(opened, "tokenbus_source_crc32").value
    except (OSError, ValueError) as error:
        raise LibraryError(str(error)) from None
    if compiled_from != zlib.crc32(source.read_bytes()):
        raise LibraryError(f"{library.name} was compiled from another version of {source.name}")
    return opened
