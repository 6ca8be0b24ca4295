"""The compiled loops of the ops: `pack` makes a message of tensors, `fill` writes one into tensors.

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


class Fault(ctypes.Structure):
    """What does not fit, as ops.c found it."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("what", "role", "slot", "limit", "value"))


class PackOptions(ctypes.Structure):
    """What is the same for all slots of a message."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("op", "message_id", "flag", "skips_prefill", "is_dense")),
        *((name, ctypes.c_uint64) for name in ("sequence", "stamp")),
    )


@cache
def pack() -> Any:  # noqa: ANN401 - ctypes has no type for a function
    """Return the function that makes a message: (options, fault, a tensor or None for each role) -> bytes, or none."""
    function = _library().tokenbus_fastdeploy_pack
    function.argtypes = [ctypes.POINTER(PackOptions), ctypes.POINTER(Fault), *[ctypes.py_object] * ROLES]
    function.restype = ctypes.py_object
    return function


@cache
def fill() -> Any:  # noqa: ANN401 - as above
    """Return the function that writes a message into tensors, and returns whether they fit.

    It takes the kind, where the message lies (None: nowhere, the tensors are only looked at), whether to write that
    there is none, whether the form packs columns, how many are wanted, three outputs, and the fault.
    """
    function = _library().tokenbus_fastdeploy_fill
    function.argtypes = [
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int64),
        *[ctypes.py_object] * 3,
        ctypes.POINTER(Fault),
    ]
    function.restype = ctypes.c_int
    return function


@cache
def _library() -> ctypes.PyDLL:
    try:
        return open_library(_LIBRARY, _SOURCE)
    except LibraryError as error:
        raise RuntimeError(f"FastDeploy's ops need their compiled part: {error}; install tokenbus again") from None
