"""The ops' compiled part. Without a C compiler at installation the first call of an op raises RuntimeError."""

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p, py_object
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenbus_contracts.native.library import LibraryError, open_library

_LIBRARY, _SOURCE = (Path(__file__).with_name(name) for name in ("ops.so", "ops.c"))
ROLES = 11
"""The number of roles that a save op's tensors can have: those of `enum role` in ops.c."""
MORE, WHOLE, ENDED, REFUSED = range(4)
"""What `receive` returns: the message is incomplete; it is whole; the peer has ended; its bytes are not a message."""
What = IntEnum(
    "What",
    "FITS NO_BUFFER DIMENSIONS MOST_SLOTS TOO_SHORT TOO_MANY NO_PLACE NARROW EMPTY NO_COLUMNS",
    start=0,
)
"""Why an argument is refused: `enum what` in ops.c."""


class Outcome(ctypes.Structure):
    """The result of a call: why an argument does not fit, or how many bytes the socket took."""

    _fields_ = tuple((name, c_int64) for name in ("what", "role", "slot", "limit", "value", "sent"))


class Call(ctypes.Structure):
    """One signature of an op: the position of each role's argument, or -1 where it has none."""

    _fields_ = (
        *((name, c_int32) for name in ("op", "is_dense", "flag_at", "skips_at")),
        ("places", c_int32 * ROLES),
    )


class Reading(ctypes.Structure):
    """How many bytes of a connection's next message have arrived, and the fields of its header."""

    _fields_ = (*((name, c_uint64) for name in ("have", "bytes", "sequence", "stamp")), ("kind", c_int64))


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    # (call, outcome, arguments, socket or -1, message id, sequence, lost slots) -> the message
    "pack": (py_object, (POINTER(Call), POINTER(Outcome), py_object, c_int, c_int, c_uint64, c_char_p)),
    # (socket, buffer's address, reading) -> MORE, WHOLE, ENDED or REFUSED
    "receive": (c_int, (c_int, c_void_p, POINTER(Reading))),
    # (socket, reading) -> 0, or the sequence if its acknowledgement found no room
    "acknowledge": (c_uint64, (c_int, POINTER(Reading))),
    # (socket) -> the last sequence that was acknowledged, 0: none, -1: the peer has ended
    "acknowledged": (c_int64, (c_int,)),
    # (an environment variable, its default) -> its number, or -1 if it is none
    "number": (c_int, (c_char_p, c_int)),
    # (kind, message's address or None to check only the outputs, whether the queue is empty, whether the form packs
    # the number of columns, columns wanted, three outputs, outcome) -> whether the outputs fit
    "fill": (c_int, (c_int, c_void_p, c_int, c_int, c_int64, *(py_object,) * 3, POINTER(Outcome))),
}
"""The functions of ops.c with their argument and result types."""


@cache
def library() -> SimpleNamespace:
    """Return the functions of ops.c by their names, and `most_bytes`, the maximum size of a message."""
    try:
        opened = open_library(_LIBRARY, _SOURCE)
    except LibraryError as error:
        raise RuntimeError(f"FastDeploy's ops need their compiled part: {error}; install tokenbus again") from None
    found = SimpleNamespace(most_bytes=c_uint32.in_dll(opened, "tokenbus_fastdeploy_most_bytes").value)
    for name, (returned, taken) in _FUNCTIONS.items():
        function = getattr(opened, f"tokenbus_fastdeploy_{name}")
        function.restype, function.argtypes = returned, taken
        setattr(found, name, function)
    return found
