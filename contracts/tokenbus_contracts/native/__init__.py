"""The compiled check: whether a plain message keeps the contract, in one pass over its bytes.

It is optional. Where no C compiler was at hand when Tokenbus was installed, or TOKENBUS_PURE_PYTHON is 1, the
checks in `validate` do the same work with numpy, and the verdicts are the same: the tests run both. What this one
does not accept goes to those, so that they alone decide what is refused, and for which reason.
"""

import ctypes
import os
import sys
import warnings
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tokenbus_contracts.batch import LogprobBatch
from tokenbus_contracts.generated.logprob_batch_pb2 import BatchHeader as HeaderMessage
from tokenbus_contracts.header import from_message
from tokenbus_contracts.limits import Limits
from tokenbus_contracts.native.rules import FITS_THE_SCHEMA, Layout, Rules, rules_for
from tokenbus_contracts.schema import COLUMNS, NO_COLUMNS

LIBRARY = Path(__file__).with_name("accept.so")
SOURCE = Path(__file__).with_name("accept.c")

_LIMITS_KEPT = 64
_VIEWS = [(column.name, column.dtype) for column in COLUMNS]


def available() -> bool:
    """Tell whether the compiled check is in use."""
    return _accepts is not None


def accepts(data: bytes, limits: Limits) -> bool:
    """Tell whether a message is known to be valid; False says nothing about it."""
    return _accepts is not None and bool(_accepts(data, len(data), _rules(limits), Layout()))


def read(data: bytes, limits: Limits) -> LogprobBatch | None:
    """Return the batch in a message that is known to be valid; None says nothing about it."""
    layout = Layout()
    if _accepts is None or not _accepts(data, len(data), _rules(limits), layout):
        return None
    header_at, header_bytes, *places = layout[:]  # a slice: one by one they cost ten times as much
    header = HeaderMessage.FromString(data[header_at : header_at + header_bytes])
    columns = NO_COLUMNS.copy()
    for (name, dtype), offset, count in zip(_VIEWS, places, places[len(_VIEWS) :], strict=False):
        if count:
            columns[name] = np.frombuffer(data, dtype, count, offset)
    return LogprobBatch.of_views(from_message(header), columns)


@lru_cache(_LIMITS_KEPT)
def _rules(limits: Limits) -> Rules:
    return rules_for(limits)


def _load() -> Any:  # noqa: ANN401 - ctypes has no type for a function with a signature
    if os.environ.get("TOKENBUS_PURE_PYTHON", "0") not in ("", "0") or sys.byteorder != "little":
        return None
    if not LIBRARY.exists():
        return None
    if not FITS_THE_SCHEMA:
        return _unusable(f"{SOURCE.name} was written for other columns than the schema has")
    try:
        # Called with the GIL held: it takes microseconds, and giving the GIL away and back costs as much.
        library = ctypes.PyDLL(str(LIBRARY))
        compiled_from = ctypes.c_uint32.in_dll(library, "tokenbus_source_crc32").value
        sizes = (library.tokenbus_rules_bytes(), library.tokenbus_layout_bytes())
        function = library.tokenbus_accepts
    except (OSError, AttributeError, ValueError) as error:
        return _unusable(str(error))
    if compiled_from != zlib.crc32(SOURCE.read_bytes()) or sizes != (ctypes.sizeof(Rules), ctypes.sizeof(Layout)):
        return _unusable(f"{LIBRARY.name} was compiled from another version of {SOURCE.name}")
    function.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.POINTER(Rules), ctypes.POINTER(ctypes.c_int64)]
    function.restype = ctypes.c_int32
    return function


def _unusable(reason: str) -> None:
    message = f"messages are checked in Python, which is slower: {reason}; install tokenbus again to mend it"
    warnings.warn(message, RuntimeWarning, stacklevel=2)


_accepts = _load()
