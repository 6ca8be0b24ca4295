"""Where a batch's columns come from: arrays that are there, or the message they lie in until they are read."""

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
"""What reads a value of each column that has one for a row: these are the first columns."""
_PLACES = {
    2 * len(columns): {
        column.name: (place, place + len(columns), column.dtype, _CODES[column.item_bytes], column.empty)
        for place, column in enumerate(columns)
    }
    for columns in (BASE_COLUMNS, COLUMNS)
}
"""Where each column's numbers are among all, by how many there are: a message without extras has none of theirs."""


class MessageColumns:
    """The columns of a plain message that keeps the contract, each read from its bytes when it is asked for.

    Args:
        data: the message.
        places: each column's offset in it, and then each column's number of elements; without extras, those of the
            base columns alone.
        is_bare: whether the message is those fields, as `select` writes them, without a header.
    """

    __slots__ = ("_is_bare", "_known", "data", "places")

    def __init__(self, data: bytes, places: Sequence[int], *, is_bare: bool = False) -> None:
        self.data = data
        self.places = places
        self._known = _PLACES[len(places)]
        self._is_bare = is_bare

    @property
    def row_count(self) -> int:
        """How many rows there are."""
        return self.places[len(self._known)]

    @property
    def has_extras(self) -> bool:
        """Whether there is more than the columns that every batch has."""
        return len(self._known) > len(BASE_COLUMNS)

    def first(self) -> list[int]:
        """Return the first row's value in each column that has one for a row."""
        return [read(self.data, at)[0] for read, at in zip(_FIRSTS, self.places, strict=False)]

    def fields(self) -> bytes:
        """Return the columns' fields as a message has them behind its header."""
        if self._is_bare:
            return self.data
        found = self.select(np.arange(self.row_count))
        if found is None:
            raise RuntimeError("a message has no rows of its own")
        return found.fields()

    def select(self, rows: native.Index) -> "MessageColumns | None":
        """Return some rows' columns, in the order in which the rows are named; None: one is not there, or twice."""
        selected = native.select(self.data, self.places, rows)
        return None if selected is None else MessageColumns(*selected, is_bare=True)

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a column as an array, a view of the message."""
        try:
            at, items, dtype, _, empty = self._known[name]
        except KeyError:  # as no row asked for it
            return COLUMN[name].empty
        count = self.places[items]
        return np.frombuffer(self.data, dtype, count, self.places[at]) if count else empty

    def numbers(self, name: str) -> Sequence[int]:
        """Return an integer column's values; for a short column this is cheaper than an array is."""
        at, items, _, code, _ = self._known[name]
        begin, count = self.places[at], self.places[items]
        if code == "B":
            return self.data[begin : begin + count]
        if count == 1:
            return _ONE[code](self.data, begin)
        values: tuple[int, ...] = unpack_from(f"<{count}{code}", self.data, begin)
        return values
