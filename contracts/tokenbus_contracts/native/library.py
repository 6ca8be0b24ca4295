"""Opens a compiled library if its source file is unchanged."""

import ctypes
import zlib
from pathlib import Path


class LibraryError(Exception):
    """The reason why the compiled library cannot be used."""


def open_library(library: Path, source: Path) -> ctypes.PyDLL:
    """Return the compiled library, or raise a LibraryError.

    Functions of the library hold the GIL, because a call takes microseconds, and releasing the GIL would take as long.
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
