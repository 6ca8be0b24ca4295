"""The compiled loops of the ops: `pack` makes a message of tensors, `receive` reads one, `fill` writes it into tensors.

The ops have no other form: where no C compiler was at hand when Tokenbus was installed, the first of them says so.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from tokenbus_contracts.native.library import LibraryError, open_library

_LIBRARY, _SOURCE = (Path(__file__).with_name(name) for name in ("ops.so", "ops.c"))
ROLES = 11
"""How many tensors a save op may be given; which is at which place is the order of `enum role` in ops.c."""
MORE, WHOLE, ENDED, REFUSED = range(4)
"""What `receive` returns: more of the message is to come, it is whole, the source has ended, it sends no messages."""


class Outcome(ctypes.Structure):
    """What came of a call: what does not fit, or how much of a message a socket took."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("what", "role", "slot", "limit", "value", "sent"))


class Call(ctypes.Structure):
    """An op with one number of arguments: which of them has which role, or -1."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("op", "is_dense", "flag_at", "skips_at")),
        ("places", ctypes.c_int32 * ROLES),
    )


class Reading(ctypes.Structure):
    """How much of a source's next message has come, and what its header says."""

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
    """Return the function that reads what is there of a message: (socket, address of a buffer, reading) -> progress."""
    function = _library().tokenbus_fastdeploy_receive
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Reading)]
    return function


@cache
def acknowledge() -> Any:  # noqa: ANN401 - as above
    """Return the function that tells the process which saved a message that it was got: (socket, reading)."""
    function = _library().tokenbus_fastdeploy_acknowledge
    function.argtypes, function.restype = [ctypes.c_int, ctypes.POINTER(Reading)], None
    return function


@cache
def acknowledged() -> Any:  # noqa: ANN401 - as above
    """Return the function that reads what was acknowledged: (socket) -> the last sequence, 0, or -1 at its end."""
    function = _library().tokenbus_fastdeploy_acknowledged
    function.restype = ctypes.c_int64
    return function


@cache
def number() -> Any:  # noqa: ANN401 - as above
    """Return the function that reads a number of the environment: (name, what is meant without it) -> number, or -1."""
    function = _library().tokenbus_fastdeploy_number
    function.argtypes = [ctypes.c_char_p, ctypes.c_int]
    return function


@cache
def fill() -> Any:  # noqa: ANN401 - as above
    """Return the function that writes a message into tensors, and returns whether they fit.

    It takes the kind, where the message lies (None: nowhere, the tensors are only looked at), whether to write that
    there is none, whether the form packs columns, how many are wanted, three outputs, and the outcome.
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
