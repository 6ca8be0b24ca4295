"""The ops' compiled part: `pack` makes a message of tensors, `receive` reads one, `fill` writes it into tensors.

There is no Python version of it: without a C compiler at installation the first call of an op raises RuntimeError.
"""

import ctypes
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

from tokenbus_contracts.native.library import LibraryError, open_library

_LIBRARY, _SOURCE = (Path(__file__).with_name(name) for name in ("ops.so", "ops.c"))
ROLES = 11
"""The number of roles that a save op's tensors can have: those of `enum role` in ops.c."""
MORE, WHOLE, ENDED, REFUSED = range(4)
"""What `receive` returns: the message is incomplete; it is whole; the peer has ended; its bytes are no message."""


class What(IntEnum):
    """Why an argument is refused, in the order of `enum what` in ops.c."""

    FITS = 0
    NO_BUFFER = 1
    DIMENSIONS = 2
    MOST_SLOTS = 3
    TOO_SHORT = 4
    TOO_MANY = 5
    NO_PLACE = 6
    NARROW = 7
    EMPTY = 8
    NO_MESSAGE_ID = 9
    NO_COLUMNS = 10


class Outcome(ctypes.Structure):
    """The result of a call: why an argument does not fit, or how many bytes the socket took."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("what", "role", "slot", "limit", "value", "sent"))


class Call(ctypes.Structure):
    """One signature of an op: the position of each role's argument, or -1 where it has none."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("op", "is_dense", "flag_at", "skips_at")),
        ("places", ctypes.c_int32 * ROLES),
    )


class Reading(ctypes.Structure):
    """How many bytes of a connection's next message have arrived, and the fields of its header."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("have", "bytes", "sequence", "stamp")),
        ("kind", ctypes.c_int64),
    )


@cache
def pack() -> Any:  # noqa: ANN401 - ctypes has no type for a function
    """Return the function that makes a message: (call, outcome, its arguments, a socket or -1, sequence) -> bytes."""
    function = _library().tokenbus_fastdeploy_pack
    function.argtypes = [ctypes.POINTER(Call), ctypes.POINTER(Outcome), ctypes.py_object, ctypes.c_int, ctypes.c_uint64]
    function.restype = ctypes.py_object
    return function


@cache
def receive() -> Any:  # noqa: ANN401 - as above
    """Return the function that receives what has arrived: (socket, buffer's address, reading) -> progress."""
    function = _library().tokenbus_fastdeploy_receive
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Reading)]
    return function


@cache
def acknowledge() -> Any:  # noqa: ANN401 - as above
    """Return the function that acknowledges a message: (socket, reading) -> 0, or the sequence if it found no room."""
    function = _library().tokenbus_fastdeploy_acknowledge
    function.argtypes, function.restype = [ctypes.c_int, ctypes.POINTER(Reading)], ctypes.c_uint64
    return function


@cache
def acknowledged() -> Any:  # noqa: ANN401 - as above
    """Return the function that reads acknowledgements: (socket) -> the last sequence, 0: none, -1: the peer ended."""
    function = _library().tokenbus_fastdeploy_acknowledged
    function.restype = ctypes.c_int64
    return function


@cache
def number() -> Any:  # noqa: ANN401 - as above
    """Return the function that reads an environment variable: (name, default) -> its number, or -1 if it is none."""
    function = _library().tokenbus_fastdeploy_number
    function.argtypes = [ctypes.c_char_p, ctypes.c_int]
    return function


@cache
def fill() -> Any:  # noqa: ANN401 - as above
    """Return the function that writes a message into tensors, and returns whether they fit.

    Its arguments: the kind; the message's address (None: only check the tensors); whether the queue is empty; whether
    the form packs the number of columns; the columns that are wanted; three outputs; the outcome.
    """
    function = _library().tokenbus_fastdeploy_fill
    function.argtypes = [
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int64),
        *[ctypes.py_object] * 3,
        ctypes.POINTER(Outcome),
    ]
    return function


@cache
def most_bytes() -> int:
    """Return the most bytes that a message may have."""
    return ctypes.c_uint32.in_dll(_library(), "tokenbus_fastdeploy_most_bytes").value


@cache
def _library() -> ctypes.PyDLL:
    try:
        return open_library(_LIBRARY, _SOURCE)
    except LibraryError as error:
        raise RuntimeError(f"FastDeploy's ops need their compiled part: {error}; install tokenbus again") from None
