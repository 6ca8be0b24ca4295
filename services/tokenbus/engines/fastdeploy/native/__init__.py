"""The compiled part of the ops. If installation found no C compiler, the first call of an op raises RuntimeError."""

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
"""Number of roles of a save op's tensors, as in `enum role` of ops.c."""
MORE, WHOLE, ENDED, REFUSED = range(4)
"""Results of `receive`: an incomplete message, a whole message, a closed connection, or an invalid message."""
What = IntEnum(
    "What",
    "FITS NO_BUFFER DIMENSIONS MOST_SLOTS TOO_SHORT TOO_MANY NO_PLACE NARROW EMPTY NO_COLUMNS",
    start=0,
)
"""Reasons to refuse an argument, as in `enum what` of ops.c."""


class Outcome(ctypes.Structure):
    """Result of a call: the reason why an argument does not fit, or the number of bytes that the socket accepted."""

    _fields_ = tuple((name, c_int64) for name in ("what", "role", "slot", "limit", "value", "sent"))


class Call(ctypes.Structure):
    """One signature of an op, with the position of each role's argument, or -1 for a role without an argument."""

    _fields_ = (
        *((name, c_int32) for name in ("op", "is_dense", "flag_at", "skips_at")),
        ("places", c_int32 * ROLES),
    )


class Reading(ctypes.Structure):
    """Number of received bytes of a connection's next message, and the fields of the message's header."""

    _fields_ = (*((name, c_uint64) for name in ("have", "bytes", "sequence", "stamp")), ("kind", c_int64))


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    # (call, outcome, arguments, socket or -1, message id, sequence, lost slots) -> the message
    "pack": (py_object, (POINTER(Call), POINTER(Outcome), py_object, c_int, c_int, c_uint64, c_char_p)),
    # (socket, buffer's address, reading) -> MORE, WHOLE, ENDED or REFUSED
    "receive": (c_int, (c_int, c_void_p, POINTER(Reading))),
    # (socket, reading) -> 0, or the sequence if the socket's buffer was too full for the acknowledgement
    "acknowledge": (c_uint64, (c_int, POINTER(Reading))),
    # (socket) -> the last acknowledged sequence, 0 if there is none, or -1 if the peer has ended
    "acknowledged": (c_int64, (c_int,)),
    # (environment variable, default) -> the variable's number, or -1 if the variable is not a number
    "number": (c_int, (c_char_p, c_int)),
    # (kind, message or None, is empty, packs columns, requested columns, 3 outputs, outcome) -> whether the outputs fit
    "fill": (c_int, (c_int, c_void_p, c_int, c_int, c_int64, *(py_object,) * 3, POINTER(Outcome))),
}
"""Functions of ops.c with their argument and result types."""


@cache
def library() -> SimpleNamespace:
    """Return the functions of ops.c by name, and the maximum size of a message as `most_bytes`."""
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
