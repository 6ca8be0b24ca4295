"""The ops' compiled part. If there was no C compiler at installation, the first call of an op raises RuntimeError."""

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
"""The results of `receive`: the message is incomplete; it is whole; the peer has ended; the bytes are no message."""
What = IntEnum(
    "What",
    "FITS NO_BUFFER DIMENSIONS MOST_SLOTS TOO_SHORT TOO_MANY NO_PLACE NARROW EMPTY NO_COLUMNS",
    start=0,
)
"""The reasons to refuse an argument: `enum what` in ops.c."""


class Outcome(ctypes.Structure):
    """The result of a call: why an argument does not fit, or the number of bytes that the socket accepted."""

    _fields_ = tuple((name, c_int64) for name in ("what", "role", "slot", "limit", "value", "sent"))


class Call(ctypes.Structure):
    """One signature of an op: the position of each role's argument, or -1 if it has none."""

    _fields_ = (
        *((name, c_int32) for name in ("op", "is_dense", "flag_at", "skips_at")),
        ("places", c_int32 * ROLES),
    )


class Reading(ctypes.Structure):
    """The number of bytes that have arrived of a connection's next message, and the fields of its header."""

    _fields_ = (*((name, c_uint64) for name in ("have", "bytes", "sequence", "stamp")), ("kind", c_int64))


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    # (call, outcome, arguments, socket or -1, message id, sequence, lost slots) -> the message
    "pack": (py_object, (POINTER(Call), POINTER(Outcome), py_object, c_int, c_int, c_uint64, c_char_p)),
    # (socket, buffer's address, reading) -> MORE, WHOLE, ENDED or REFUSED
    "receive": (c_int, (c_int, c_void_p, POINTER(Reading))),
    # (socket, reading) -> 0, or the sequence if there was no room for its acknowledgement
    "acknowledge": (c_uint64, (c_int, POINTER(Reading))),
    # (socket) -> the last sequence that was acknowledged, 0: none, -1: the peer has ended
    "acknowledged": (c_int64, (c_int,)),
    # (an environment variable, its default) -> its number, or -1 if it is not a number
    "number": (c_int, (c_char_p, c_int)),
    # (kind, message's address or None to check only the outputs, whether the queue is empty, whether the form packs the
    # number of columns, requested columns, three outputs, outcome) -> whether the outputs fit
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
