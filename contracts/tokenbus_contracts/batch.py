"""LogprobBatch: one step's tokens as columns."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.columns import MessageColumns
from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.extras import extras_of
from tokenbus_contracts.fitting import fitted, kind_of
from tokenbus_contracts.generated.columns import ColumnArguments, ColumnArrays
from tokenbus_contracts.generated.enums import RowStatus
from tokenbus_contracts.header import BatchHeader
from tokenbus_contracts.layout import Index, Layout
from tokenbus_contracts.rows import OnlyRow, Row, Rows
from tokenbus_contracts.schema import BASE_COLUMNS, COLUMN, COLUMNS, Column

if TYPE_CHECKING:
    from typing_extensions import Unpack  # Python 3.10's typing module has no Unpack

_BASE_COUNT = len(BASE_COLUMNS)
STOP_TOKEN, FIRST_STOP_TEXT = 1, 2
"""Values in the column `stops`. The stop text at index i has the value FIRST_STOP_TEXT + i."""
_OPTIONAL = ("stops", "extras", "given_counts", "mask_bounds")
"""Columns that may be empty: each of their values then counts as zero."""
_set = object.__setattr__  # LogprobBatch.__setattr__ refuses every assignment


class LogprobBatch(ColumnArrays):
    """The tokens of one step, or of one part of a step, as parallel columns.

    logprob_batch.proto documents the columns. A column may be any value that numpy converts to an array.
    Values that do not fit the column's type raise a ContractError. `encode` and `decode` check all other rules. A batch
    is immutable, because its arrays may be views of a message.

    Example:
        raw = tokenbus.ValueKind.RAW_LOGPROBS
        header = tokenbus.BatchHeader("worker-0", epoch=1, sequence=1, step=1, step_rows=1, value_kind=raw)
        batch = tokenbus.LogprobBatch(
            header,
            request_ids=[7], batch_indices=[0], positions=[0], statuses=[tokenbus.RowStatus.ACTIVE],
            token_counts=[2], draft_token_counts=[1], proposal_counts=[0], scorings=[tokenbus.Scoring.FULL], top_ks=[0],
            token_ids=[11, 12], logprobs=[-0.25, -1.5], ranks=[1, 2],
        )
        for row in batch.in_batch_order().rows():
            print(row.request_id, row.token_ids, row.logprobs)
    """

    __slots__ = ("_layout", "_message", "_rows", "has_extras", "header")

    has_extras: bool
    """Whether the batch may have extra columns."""
    _layout: Layout
    _message: MessageColumns | None
    _rows: Rows | OnlyRow
    header: BatchHeader

    def __init__(self, header: BatchHeader, **columns: "Unpack[ColumnArguments]") -> None:
        """Create a batch from columns by name. An omitted column is empty."""
        if not isinstance(header, BatchHeader):
            raise ContractError("header", "a BatchHeader", type(header).__name__, rule=Rule.TYPE)
        _set(self, "header", header)
        _set(self, "_message", None)
        given: dict[str, Any] = columns  # type: ignore[assignment]
        for set_column, name, dtype, empty in _SETTERS:
            values = given.pop(name, empty)
            if type(values) is np.ndarray and values.dtype is dtype and values.ndim == 1:
                set_column(self, values)
            else:
                set_column(self, fitted(COLUMN[name], values))
        _set(self, "has_extras", bool(given))
        for name, values in given.items():
            if name not in COLUMN:
                raise TypeError(f"LogprobBatch has no column {name}")
            is_fit = type(values) is np.ndarray and values.dtype is COLUMN[name].dtype and values.ndim == 1
            _set(self, name, values if is_fit else fitted(COLUMN[name], values))

    @classmethod
    def of_views(cls, header: BatchHeader, columns: dict[str, npt.NDArray[Any]]) -> "LogprobBatch":
        """Create a batch from all base columns and optional extra columns, as arrays of the columns' types."""
        batch = cls.__new__(cls)
        _set(batch, "header", header)
        _set(batch, "_message", None)
        _set(batch, "has_extras", len(columns) > _BASE_COUNT)
        for name, values in columns.items():
            _set(batch, name, values)
        return batch

    @classmethod
    def of_message(cls, header: BatchHeader, columns: MessageColumns) -> "LogprobBatch":
        """Create a batch from a valid message. Each column becomes an array on its first use."""
        batch = cls.__new__(cls)
        _set_header(batch, header)
        _set_message(batch, columns)
        return batch

    def headed(self, header: BatchHeader) -> "LogprobBatch":
        """Return a batch with the same columns under another header."""
        if self._message is not None:
            return self.of_message(header, self._message)
        return self.of_views(header, self.columns)  # the new batch does not copy the cached layout and rows

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a batch is immutable; make another one with another {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a batch is immutable; {name} cannot be deleted")

    @property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The columns by name, in the order of their fields. A batch without extras has only the base columns."""
        return {column.name: getattr(self, column.name) for column in self._present()}

    def arrays(self, names: Sequence[str]) -> list[npt.NDArray[Any]]:
        """Return several columns. This is faster than reading attributes, because views of a message are not cached."""
        if self._message is None:
            return [getattr(self, name) for name in names]
        return list(map(self._message.array, names))

    @property
    def is_message(self) -> bool:
        """Whether the columns are views of one received message."""
        return self._message is not None

    @property
    def row_count(self) -> int:
        """The number of rows."""
        return self.request_ids.size

    def __eq__(self, other: object) -> bool:
        """Return whether both batches have the same header and bitwise equal columns."""
        if not isinstance(other, LogprobBatch):
            return NotImplemented
        return self.header == other.header and all(
            getattr(self, column.name).tobytes() == getattr(other, column.name).tobytes() for column in COLUMNS
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Return the header's ids and the numbers of rows, tokens and alternatives, without the columns."""
        header = self.header
        return (
            f"<LogprobBatch {header.worker_id}/{header.epoch} sequence={header.sequence} step={header.step} "
            f"kind={header.kind!r} rows={self.row_count} tokens={self.token_ids.size} "
            f"alternatives={self.alternative_token_ids.size}>"
        )

    def has_consistent_lengths(self) -> bool:
        """Return whether the columns' lengths fit the counts, so that each element belongs to a row."""
        try:
            self._layout  # noqa: B018 - the constructor of Layout compares the lengths
        except ContractError:
            return False
        return True

    @property
    def nbytes(self) -> int:
        """The total size of the columns in bytes."""
        if self._message is not None:
            return len(self._message.data)
        return sum(values.nbytes for values in self.columns.values())

    def row_bytes(self) -> Index:
        """Return the total size of each row's elements in all columns, in bytes."""
        found = np.zeros(self.row_count, np.intp)
        for column in self._present():
            if getattr(self, column.name).size:
                found += column.item_bytes * np.diff(self._layout.starts[column.length])
        return found

    def runs(self, most_rows: int, most_bytes: int, beside: Index | None = None) -> list[int]:
        """Split the rows into runs that each fit into one message, and return the end index of each run.

        A row that is too large for a message is a run by itself.

        Args:
            most_rows: the maximum number of rows in a message.
            most_bytes: the maximum total size of a message's rows in bytes.
            beside: for each row, a number of bytes to add to the row's size.
        """
        sizes = self.row_bytes() if beside is None else self.row_bytes() + beside
        ends, begin, used = [], 0, 0
        for row, size in enumerate(sizes.tolist()):
            if row > begin and (used + size > most_bytes or row - begin >= most_rows):
                ends.append(row)
                begin, used = row, 0
            used += size
        return [*ends, self.row_count]

    def rows(self) -> Iterator[Row]:
        """Yield the rows in the order of the columns."""
        return iter(self._rows)

    def row(self, index: int) -> Row:
        """Return the row at an index, or raise IndexError."""
        return self._rows.row(index)

    def stop(self, index: int) -> int:
        """Return the row's value in the column `stops`, or zero if the row has no such value."""
        if not self.stops.size or self.statuses[index] != RowStatus.FINISHED_STOP:
            return 0
        return int(self.stops[np.count_nonzero(self.statuses[:index] == RowStatus.FINISHED_STOP)])

    def in_batch_order(self) -> "LogprobBatch":
        """Return the batch with its rows in original batch order. All columns are permuted together."""
        indices = self.batch_indices
        if bool((indices[1:] > indices[:-1]).all()):
            return self
        rows = np.argsort(indices, kind="stable")
        return self._selected(rows, self.header) or self._taken(self._layout.elements(rows), self.header)

    def select(self, rows: npt.ArrayLike) -> "LogprobBatch":
        """Return a batch with the rows at the given indexes, marked as a selection."""
        places = np.asarray(rows)
        if not places.size:
            places = np.zeros(0, np.intp)
        if places.dtype.kind not in "iu" or places.ndim != 1:
            raise ContractError("rows", "places in the columns", kind_of(places), rule=Rule.TYPE)
        header = self.header._replace(selection=True)
        if (found := self._selected(places.astype(np.intp), header)) is not None:
            return found
        if places.size and not 0 <= int(places.min()) <= int(places.max()) < self.row_count:
            beyond = int(places.min()) if int(places.min()) < 0 else int(places.max())
            raise ContractError("rows", f"places from 0 to {self.row_count - 1}", beyond, rule=Rule.MAX)
        if np.unique(places).size != places.size:
            raise ContractError("rows", "each place once", "the same place twice", rule=Rule.UNIQUE)
        return self._taken(self._layout.elements(places.astype(np.intp)), header)

    def between(self, begins: npt.ArrayLike, ends: npt.ArrayLike) -> "LogprobBatch":
        """Return a batch with a range of consecutive tokens of each row, including all values of these tokens.

        `begins` and `ends` have one token index for each row. Each row's new position is the position of its first
        remaining token. The rows keep their statuses, so an active row without a remaining token is invalid.
        """
        first, last = np.asarray(begins, np.intp), np.asarray(ends, np.intp)
        if first.shape != (self.row_count,) or last.shape != first.shape:
            raise ContractError("begins", f"{self.row_count} places, one for each row", first.size, rule=Rule.LENGTH)
        if not bool(((first >= 0) & (first <= last) & (last <= self.token_counts)).all()):
            raise ContractError("begins", "places in order within each row's tokens", "others", rule=Rule.MAX)
        kept = self._taken(self._layout.elements_between(first, last), self.header)
        _set(kept, "positions", self.positions + first.astype(np.uint32))
        _set(kept, "token_counts", (last - first).astype(np.uint8))
        return kept

    @classmethod
    def joined(cls, parts: Sequence["LogprobBatch"]) -> "LogprobBatch":
        """Join the parts of one step into one batch in original batch order, under the last part's header."""
        return cls.concatenated(parts, parts[-1].header._replace(part_index=0, part_count=1)).in_batch_order()

    @classmethod
    def concatenated(cls, parts: Sequence["LogprobBatch"], header: BatchHeader) -> "LogprobBatch":
        """Return the rows of several batches in sequence, under one header."""
        present = COLUMNS if any(part.has_extras for part in parts) else BASE_COLUMNS
        names = [column.name for column in present]
        found = zip(*(part.arrays(names) for part in parts), strict=True)
        columns = dict(zip(names, map(np.concatenate, found), strict=True))
        for name in _OPTIONAL:
            if name in columns and columns[name].size:
                columns[name] = np.concatenate([_filled(part, name) for part in parts])
        return cls.of_views(header, columns)

    def _selected(self, rows: Index, header: BatchHeader) -> "LogprobBatch | None":
        """Return the rows at these indexes, or None if an index is invalid or the batch was not read from a message."""
        columns = None if self._message is None else self._message.select(rows)
        return None if columns is None else self.of_message(header, columns)

    def _taken(self, elements: dict[int, Index], header: BatchHeader) -> "LogprobBatch":
        """Return a batch of the elements at these indexes.

        Only this function moves elements of columns, so all columns always move together.
        """
        taken = {column.name: getattr(self, column.name) for column in self._present()}
        for column in self._present():
            if taken[column.name].size:
                taken[column.name] = taken[column.name][elements[column.length]]
        return self.of_views(header, taken)

    def _present(self) -> Sequence[Column]:
        return COLUMNS if self.has_extras else BASE_COLUMNS

    if not TYPE_CHECKING:  # mypy must not see __getattr__, because it would then accept any name

        def __getattr__(self, name: str) -> object:
            """Create an attribute on its first use: a column, the layout or the rows."""
            if name in COLUMN:
                made: object = COLUMN[name].empty if self._message is None else self._message.array(name)
            elif name == "has_extras":
                made = self._message.has_extras
            elif name == "_layout":
                made = Layout(self, has_extras=self.has_extras)
            elif name == "_rows":
                made = self._made_rows()
            else:
                raise AttributeError(f"a batch has no {name}", name=name, obj=self)
            _set(self, name, made)
            return made

    def _made_rows(self) -> Rows | OnlyRow:
        message = self._message
        has_extras = self.has_extras if message is None else message.has_extras  # faster than __getattr__
        extras = extras_of(self, self._layout.starts) if has_extras else None
        if message is not None:
            return OnlyRow(message, extras) if message.row_count == 1 else Rows(message.array, message.numbers, extras)
        self._layout  # noqa: B018 - raises a ContractError if the columns' lengths do not fit the counts
        return Rows(self.__getattribute__, lambda name: getattr(self, name).tolist(), extras)


_SETTERS = [
    (ColumnArrays.__dict__[column.name].__set__, column.name, column.dtype, column.empty) for column in BASE_COLUMNS
]
"""The setters of the base columns. A call of a setter is faster than `_set`, which looks the column up by name."""
_set_header, _set_message = (LogprobBatch.__dict__[name].__set__ for name in ("header", "_message"))


def _filled(batch: LogprobBatch, name: str) -> npt.NDArray[Any]:
    """Return an optional column. If the column is empty, return zeros for all rows."""
    column: npt.NDArray[Any] = getattr(batch, name)
    if column.size:
        return column
    stopped = np.count_nonzero(batch.statuses == RowStatus.FINISHED_STOP)
    return np.zeros(stopped if name == "stops" else batch.row_count, column.dtype)
