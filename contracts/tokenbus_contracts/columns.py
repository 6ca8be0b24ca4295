"""MessageColumns reads the columns of a received message from its bytes on first use."""

from collections.abc import Sequence
from struct import Struct, unpack_from
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import native
from tokenbus_contracts.generated.bounds_pb2 import ColumnLength
from tokenbus_contracts.schema import BASE_COLUMNS, COLUMN, COLUMNS

_CODES = {1: "B", 4: "I", 8: "Q"}
_ONE = {code: Struct(f"<{code}").unpack_from for code in _CODES.values()}
_FIRSTS = [_ONE[_CODES[column.item_bytes]] for column in COLUMNS if column.length == ColumnLength.COLUMN_LENGTH_ROWS]
"""One function for each column with one element per row: the function reads a single value of the column."""
_PLACES = {
    2 * len(columns): {
        column.name: (place, place + len(columns), column.dtype, _CODES[column.item_bytes], column.empty)
        for place, column in enumerate(columns)
    }
    for columns in (BASE_COLUMNS, COLUMNS)
}
"""For both lengths of `places`: where `places` has each column's offset and length, and how to read the column."""


class MessageColumns:
    """The columns of a valid message in the plain encoding.

    Args:
        data: the message.
        places: first the offsets of all columns in `data`, then the numbers of elements of all columns. If the message
            has no extras, `places` covers only the base columns.
        is_bare: whether the message has no header, as in the result of `select`.
    """

    __slots__ = ("_is_bare", "_known", "data", "places")

    def __init__(self, data: bytes, places: Sequence[int], *, is_bare: bool = False) -> None:
        self.data = data
        self.places = places
        self._known = _PLACES[len(places)]
        self._is_bare = is_bare

    @property
    def row_count(self) -> int:
        return self.places[len(self._known)]

    @property
    def has_extras(self) -> bool:
        """Whether the message has columns other than the base columns."""
        return len(self._known) > len(BASE_COLUMNS)

    def first(self) -> list[int]:
        """Return the first row's value in each column that has one element per row."""
        return [read(self.data, at)[0] for read, at in zip(_FIRSTS, self.places, strict=False)]

    def fields(self) -> bytes:
        """Return the encoded columns without the header."""
        if self._is_bare:
            return self.data
        found = self.select(np.arange(self.row_count))
        if found is None:
            raise RuntimeError("selecting all rows of a message failed")
        return found.fields()

    def select(self, rows: native.Index) -> "MessageColumns | None":
        """Return the columns of some rows in the given order, or None if a row does not exist or is repeated."""
        selected = native.select(self.data, self.places, rows)
        return None if selected is None else MessageColumns(*selected, is_bare=True)

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a column as an array, which is a view of the message."""
        try:
            at, items, dtype, _, empty = self._known[name]
        except KeyError:  # the message has only base columns
            return COLUMN[name].empty
        count = self.places[items]
        return np.frombuffer(self.data, dtype, count, self.places[at]) if count else empty

    def numbers(self, name: str) -> Sequence[int]:
        """Return an integer column's values. For a short column, `numbers` is faster than `array`."""
        at, items, _, code, _ = self._known[name]
        begin, count = self.places[at], self.places[items]
        if code == "B":
            return self.data[begin : begin + count]
        if count == 1:
            return _ONE[code](self.data, begin)
        values: tuple[int, ...] = unpack_from(f"<{count}{code}", self.data, begin)
        return values
