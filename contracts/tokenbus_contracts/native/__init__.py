"""The optional compiled code, which checks a message in the plain encoding, or selects its rows, in one pass.

Without a C compiler at installation, or if TOKENBUS_PURE_PYTHON is 1, Python code does the same work with numpy. The
tests run both implementations. If the compiled check refuses a message, `validate` checks the message again, and names
the reason for a refusal.
"""

import ctypes
import os
import sys
import warnings
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.header import BatchHeader, from_values
from tokenbus_contracts.limits import Limits
from tokenbus_contracts.native.library import LibraryError, open_library
from tokenbus_contracts.native.rules import HEADER_NUMBERS, Layout, Rules, rules_for
from tokenbus_contracts.schema import BASE_COLUMNS, COLUMNS, HEADER

LIBRARY = Path(__file__).with_name("accept.so")
SOURCE = Path(__file__).with_name("accept.c")

Index = npt.NDArray[np.intp]

_LIMITS_KEPT = 64
_MOST_KEY_BYTES = 8
"""The maximum size of a column's key and length in bytes, as in accept.c."""


class Share(NamedTuple):
    """The rows of a message that one consumer receives."""

    number: int
    begin: int
    """The index of the consumer's first row among all rows, which are ordered by consumer."""
    end: int
    message: bytes
    """The message with the consumer's rows, or empty bytes if the caller asked for no message."""
    request_ids: bytes
    """The bytes of the column request_ids in the message."""


class RequestColumns(ctypes.Structure):
    """Columns of requests, indexed by slot, which accept.c reads without a copy."""

    _fields_ = (
        ("streams", ctypes.c_void_p),
        ("shares", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("running", ctypes.c_int64),
    )

    @classmethod
    def of(
        cls,
        *,
        streams: npt.NDArray[np.int32],
        shares: npt.NDArray[np.int32],
        states: npt.NDArray[np.uint8],
        positions: npt.NDArray[np.int64],
        running: int,
    ) -> "RequestColumns":
        """Return the arrays as RequestColumns. The caller must keep the arrays alive as long as the result.

        Element i of each array describes request i: its stream, its consumer (in `shares`), its state, or the position
        of its next token. Only rows of requests in the state `running` are distributed.
        """
        columns = (streams, shares, states, positions)
        return cls(*(column.__array_interface__["data"][0] for column in columns), streams.size, running)


_latest: list[tuple[Limits | None, Rules]] = [(None, Rules())]
"""The limits of the most recent message, with the rules made from these limits."""
_BASE, _ALL = len(BASE_COLUMNS), len(COLUMNS)
_OF_EXTRAS = f"{8 * (_ALL - _BASE)}x"
_PLACES = {2 * _ALL: Struct(f"{2 * _ALL}q"), 2 * _BASE: Struct(2 * f"{_BASE}q{_OF_EXTRAS}")}
"""The struct formats of `places` by its length, which depends on whether the message has extra columns."""
_BASE_ALONE, _WITH_EXTRAS = 1, 2
"""The kinds of accepted messages, as in accept.c."""
_LAYOUTS = {
    _BASE_ALONE: Struct(f"16x{HEADER_NUMBERS}Q" + 2 * f"{_BASE}Q{_OF_EXTRAS}"),
    _WITH_EXTRAS: Struct(f"16x{HEADER_NUMBERS + 2 * _ALL}Q"),
}
"""The struct formats of a `Layout` after its first two fields. Reading through ctypes takes three times as long."""
_TEXT_NUMBER = HEADER.fields_by_name["worker_id"].number


def available() -> bool:
    """Return whether the compiled check is in use."""
    return _accepts is not None


def accepts(data: bytes, limits: Limits) -> bool:
    """Return whether a message is certainly valid. If the result is False, the message may still be valid."""
    return _accepts is not None and bool(_accepts(data, len(data), _rules(limits), Layout()))


def read(data: bytes, limits: Limits) -> tuple[BatchHeader, Sequence[int]] | None:
    """Return the header and the columns' offsets and lengths, or None if the compiled check refuses the message."""
    layout = Layout()
    found = 0 if _accepts is None else _accepts(data, len(data), _rules(limits), layout)
    if not found:
        return None
    values = _LAYOUTS[found].unpack(layout)
    header = from_values(values, str(data[values[0] : values[0] + values[_TEXT_NUMBER]], "ascii"))
    return header, values[HEADER_NUMBERS:]


def select(data: bytes, places: Sequence[int], rows: Index) -> tuple[bytes, Sequence[int]] | None:
    """Return the encoded columns of some rows of an accepted message, and the offset and length of each column.

    Returns None if a row does not exist or is repeated.
    """
    layout = _PLACES[len(places)]
    taken = np.empty(layout.size + len(data), np.uint8)
    chosen = np.asarray(rows, np.int64).tobytes()
    laid = taken.__array_interface__["data"][0]
    where = laid + layout.size
    size = _selects(data, layout.pack(*places), chosen, len(chosen) // 8, _schema_rules(), where, laid)
    return None if size < 0 else (taken[layout.size : layout.size + size].tobytes(), layout.unpack_from(taken.data))


def deal(  # noqa: PLR0913, PLR0917 - the arguments of the C function
    data: bytes, places: Sequence[int], slots: Index, requests: RequestColumns, stream: int, least: int, head: bytes
) -> tuple[Index, list[Share]] | None:
    """Distribute the rows of an accepted message among the consumers of their requests.

    Returns the indexes of the rows, ordered by consumer and then by batch index, and a Share for each consumer. Returns
    None if a row is not the next row of its request.
    """
    rows = most = len(slots)
    room = most * (len(head) + _MOST_KEY_BYTES * len(COLUMNS))
    written, laid = np.empty(len(data) + room, np.uint8), np.empty(rows + 4 * most, np.int64)
    where, laid_at = written.__array_interface__["data"][0], laid.__array_interface__["data"][0]
    asked = slots.tobytes(), requests, stream, least, head, len(head), _schema_rules()
    count = _deals(data, _PLACES[len(places)].pack(*places), *asked, where, laid_at, laid_at + 8 * rows, most)
    if count < 0:
        return None
    numbers = laid[rows : rows + 4 * count].reshape(count, 4).tolist()
    messages, shares, begin, at = written[: sum(each[2] for each in numbers)].tobytes(), [], 0, 0
    for number, end, size, ids_at in numbers:
        ids = messages[at + ids_at : at + ids_at + 8 * (end - begin)] if size else b""
        shares.append(Share(number, begin, end, messages[at : at + size], ids))
        begin, at = end, at + size
    return laid[:rows], shares


def _rules(limits: Limits) -> Rules:
    # Successive messages usually have the same limits. Comparing them with `is` avoids a slow hash.
    known, rules = _latest[0]
    if limits is not known:
        rules = _rules_of(limits)
        _latest[0] = limits, rules
    return rules


@lru_cache(_LIMITS_KEPT)
def _rules_of(limits: Limits) -> Rules:
    return rules_for(limits)


@cache
def _schema_rules() -> Rules:
    return rules_for(Limits.schema())


def _load() -> tuple[Any, Any, Any]:
    """Return the C functions check, select and deal, or three None values if the library cannot be used."""
    if os.environ.get("TOKENBUS_PURE_PYTHON", "0") not in ("", "0") or sys.byteorder != "little":
        return _NONE
    if not LIBRARY.exists():
        return _NONE
    try:
        library = open_library(LIBRARY, SOURCE)
        columns = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, "tokenbus_columns")))
        sizes = (library.tokenbus_rules_bytes(), library.tokenbus_layout_bytes())
        accepts, selects, deals = library.tokenbus_accepts, library.tokenbus_selects, library.tokenbus_deals
    except (LibraryError, AttributeError, ValueError) as error:
        return _unusable(str(error))
    if columns.decode() != "".join(f"{column.name.upper()}:{column.item_bytes} " for column in COLUMNS):
        return _unusable(f"the columns in {SOURCE.name} differ from the schema's")
    if sizes != (ctypes.sizeof(Rules), ctypes.sizeof(Layout)):
        return _unusable(f"{LIBRARY.name} was compiled from another version of {SOURCE.name}")
    rules, text, number = ctypes.POINTER(Rules), ctypes.c_char_p, ctypes.c_int64
    accepts.argtypes, accepts.restype = [text, number, rules, ctypes.POINTER(ctypes.c_uint64)], ctypes.c_int32
    selects.argtypes = [text, text, text, number, rules, ctypes.c_void_p, ctypes.c_void_p]
    table = ctypes.POINTER(RequestColumns)
    given: list[Any] = [text, text, text, table, ctypes.c_int32, ctypes.c_int32, text, number, rules]
    deals.argtypes = [*given, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, number]
    selects.restype = deals.restype = number
    return accepts, selects, deals


def _unusable(reason: str) -> tuple[None, None, None]:
    message = f"messages are checked in Python, which is slower: {reason}; install tokenbus again to fix this"
    warnings.warn(message, RuntimeWarning, stacklevel=2)
    return _NONE


_NONE = None, None, None
_accepts, _selects, _deals = _load()
