"""Where a batch's columns come from: arrays that are there, or the message they lie in until they are read."""

import ctypes
from collections.abc import Callable, Sequence
from struct import Struct, unpack_from
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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
Index = npt.NDArray[np.intp]
Selected = tuple[bytes, Sequence[int]]


class Share(NamedTuple):
    """The rows of a message that one of those takes that it is dealt out to."""

    number: int
    begin: int
    """Its first row, among all of them in their new order."""
    end: int
    message: bytes
    """The rows as a message of their own; empty where none was asked for."""
    request_ids: bytes
    """Their request keys, as the message has them."""


class RequestColumns(ctypes.Structure):
    """What is known of requests, as columns by slot: accept.c reads them, and moves the positions on."""

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
        """Return the columns, whose arrays must live as long as this.

        By slot: the stream that brings a request's rows, the share that they belong to, the request's state, and its
        next position. Rows are dealt out only of requests whose state is `running`.
        """
        columns = (streams, shares, states, positions)
        return cls(*(column.__array_interface__["data"][0] for column in columns), streams.size, running)


class Taking(NamedTuple):
    """What takes rows out of a plain message, as they are named. None: one is not there, or is named twice."""

    select: Callable[[bytes, Sequence[int], Index], Selected | None]
    """Returns some rows as the fields of their columns, and the places of those."""
    cut: Callable[[bytes, Sequence[int], Index, Index, bytes], list[bytes] | None]
    """Returns several messages of rows, each up to its end among them, and each behind the same header's field."""
    deal: Callable[[bytes, Sequence[int], Index, RequestColumns, int, int, bytes], tuple[Index, list[Share]] | None]
    """Returns the places of all rows, those of one share together, and the shares; see `native.deal`."""


class MessageColumns:
    """The columns of a plain message that keeps the contract, each read from its bytes when it is asked for.

    Args:
        data: the message.
        places: each column's offset in it, and then each column's number of elements; without extras, those of the
            base columns alone.
        taking: what takes rows out of such a message.
        is_bare: whether the message is those fields, as `select` writes them, without a header.
    """

    __slots__ = ("_data", "_is_bare", "_known", "_places", "_taking")

    def __init__(self, data: bytes, places: Sequence[int], taking: Taking, *, is_bare: bool = False) -> None:
        self._data = data
        self._places = places
        self._known = _PLACES[len(places)]
        self._taking = taking
        self._is_bare = is_bare

    @property
    def row_count(self) -> int:
        """How many rows there are."""
        return self._places[len(self._known)]

    @property
    def has_extras(self) -> bool:
        """Whether there is more than the columns that every batch has."""
        return len(self._known) > len(BASE_COLUMNS)

    def first(self) -> list[int]:
        """Return the first row's value in each column that has one for a row."""
        return [read(self._data, at)[0] for read, at in zip(_FIRSTS, self._places, strict=False)]

    def fields(self) -> bytes:
        """Return the columns' fields as a message has them behind its header."""
        if self._is_bare:
            return self._data
        found = self.select(np.arange(self.row_count))
        if found is None:
            raise RuntimeError("a message has no rows of its own")
        return found.fields()

    def select(self, rows: Index) -> "MessageColumns | None":
        """Return some rows' columns, in the order in which the rows are named; None: one is not there, or twice."""
        selected = self._taking.select(self._data, self._places, rows)
        return None if selected is None else MessageColumns(*selected, self._taking, is_bare=True)

    def cut(self, rows: Index, ends: Index, head: bytes) -> list[bytes] | None:
        """Return messages of rows, each of those before its end among them, behind one header; None: as `select`."""
        return self._taking.cut(self._data, self._places, rows, ends, head)

    def deal(
        self, slots: Index, requests: RequestColumns, stream: int, least: int, head: bytes
    ) -> tuple[Index, list[Share]] | None:
        """Return all rows in the order of the shares that take them, and the shares, each a message behind a header."""
        return self._taking.deal(self._data, self._places, slots, requests, stream, least, head)

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a column as an array, a view of the message."""
        try:
            at, items, dtype, _, empty = self._known[name]
        except KeyError:  # as no row asked for it
            return COLUMN[name].empty
        count = self._places[items]
        return np.frombuffer(self._data, dtype, count, self._places[at]) if count else empty

    def numbers(self, name: str) -> Sequence[int]:
        """Return an integer column's values; for a short column this is cheaper than an array is."""
        at, items, _, code, _ = self._known[name]
        begin, count = self._places[at], self._places[items]
        if code == "B":
            return self._data[begin : begin + count]
        if count == 1:
            return _ONE[code](self._data, begin)
        values: tuple[int, ...] = unpack_from(f"<{count}{code}", self._data, begin)
        return values
