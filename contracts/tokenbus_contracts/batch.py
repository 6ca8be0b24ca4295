"""LogprobBatch: one step's tokens as columns."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.columns import Index, elements_of, starts_of
from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.generated.bounds_pb2 import ColumnLength
from tokenbus_contracts.generated.enums import RowStatus, Scoring
from tokenbus_contracts.header import BatchHeader
from tokenbus_contracts.schema import COLUMN, COLUMNS, Column

_TYPES = [(column.name, column.dtype) for column in COLUMNS]


class Row(NamedTuple):
    """One request's share of a batch; the arrays are views of the batch's columns.

    `logprobs` and `ranks` are empty where the row is not scored; the alternatives are one line a token.
    """

    key: int
    batch_index: int
    position: int
    status: RowStatus
    draft_token_count: int
    scoring: Scoring
    token_ids: npt.NDArray[np.uint32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.uint32]
    alternative_token_ids: npt.NDArray[np.uint32]
    alternative_logprobs: npt.NDArray[np.float32]
    proposal_token_ids: npt.NDArray[np.uint32]


class LogprobBatch:
    """One step's tokens, or one part of them, as parallel columns.

    logprob_batch.proto says what each column holds, and in which order. A column may be given as anything
    numpy reads; what does not fit the column's type is a ContractError. `encode` and `decode` check
    everything else. A batch is not changed once it is made: its arrays may be views of a message.
    """

    __slots__ = ("_layout", "header", *(column.name for column in COLUMNS))

    header: BatchHeader
    request_keys: npt.NDArray[np.uint64]
    batch_indices: npt.NDArray[np.uint32]
    positions: npt.NDArray[np.uint32]
    statuses: npt.NDArray[np.uint8]
    token_counts: npt.NDArray[np.uint8]
    draft_token_counts: npt.NDArray[np.uint8]
    proposal_counts: npt.NDArray[np.uint8]
    scorings: npt.NDArray[np.uint8]
    top_ks: npt.NDArray[np.uint8]
    token_ids: npt.NDArray[np.uint32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.uint32]
    alternative_token_ids: npt.NDArray[np.uint32]
    alternative_logprobs: npt.NDArray[np.float32]
    proposal_token_ids: npt.NDArray[np.uint32]

    def __init__(  # noqa: PLR0913 - the columns are what they are, and each has a name
        self,
        header: BatchHeader,
        *,
        request_keys: npt.ArrayLike = (),
        batch_indices: npt.ArrayLike = (),
        positions: npt.ArrayLike = (),
        statuses: npt.ArrayLike = (),
        token_counts: npt.ArrayLike = (),
        draft_token_counts: npt.ArrayLike = (),
        proposal_counts: npt.ArrayLike = (),
        scorings: npt.ArrayLike = (),
        top_ks: npt.ArrayLike = (),
        token_ids: npt.ArrayLike = (),
        logprobs: npt.ArrayLike = (),
        ranks: npt.ArrayLike = (),
        alternative_token_ids: npt.ArrayLike = (),
        alternative_logprobs: npt.ArrayLike = (),
        proposal_token_ids: npt.ArrayLike = (),
    ) -> None:
        """Take the header and the columns; a column that is left out is empty."""
        if not isinstance(header, BatchHeader):
            raise ContractError("header", "a BatchHeader", type(header).__name__, rule=Rule.TYPE)
        given = (
            request_keys,
            batch_indices,
            positions,
            statuses,
            token_counts,
            draft_token_counts,
            proposal_counts,
            scorings,
            top_ks,
            token_ids,
            logprobs,
            ranks,
            alternative_token_ids,
            alternative_logprobs,
            proposal_token_ids,
        )
        self.header = header
        self._layout: _Layout | None = None
        for (name, dtype), values in zip(_TYPES, given, strict=True):
            fits = type(values) is np.ndarray and values.dtype is dtype and values.ndim == 1
            setattr(self, name, values if fits else _fitted(COLUMN[name], values))

    @classmethod
    def of_views(cls, header: BatchHeader, columns: dict[str, npt.NDArray[Any]]) -> Self:
        """Make a batch of all its columns, each an array of its column's own type."""
        batch = cls.__new__(cls)
        batch.header = header
        batch._layout = None  # noqa: SLF001 - it is one of this class
        for name, values in columns.items():
            setattr(batch, name, values)
        return batch

    @property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The columns by name, in the order of their fields."""
        return {column.name: getattr(self, column.name) for column in COLUMNS}

    @property
    def row_count(self) -> int:
        """How many rows the batch has."""
        return self.request_keys.size

    def __eq__(self, other: object) -> bool:
        """Tell whether the other batch has the same header, and the same bits in every column."""
        if not isinstance(other, LogprobBatch):
            return NotImplemented
        return self.header == other.header and all(
            mine.tobytes() == theirs.tobytes()
            for mine, theirs in zip(self.columns.values(), other.columns.values(), strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Return the header's names and the sizes, never the columns."""
        header = self.header
        return (
            f"<LogprobBatch {header.worker_id}/{header.epoch} sequence={header.sequence} step={header.step} "
            f"kind={header.kind!r} rows={self.row_count} tokens={self.token_ids.size} "
            f"alternatives={self.alternative_token_ids.size}>"
        )

    def has_consistent_lengths(self) -> bool:
        """Tell whether every column is as long as the counts demand: if not, nobody can say which row is which."""
        by_row = (self.columns[column.name] for column in COLUMNS if column.length == ColumnLength.COLUMN_LENGTH_ROWS)
        if any(values.size != self.row_count for values in by_row):
            return False
        layout = self._laid_out()
        demanded: dict[int, int] = {
            ColumnLength.COLUMN_LENGTH_ROWS: self.row_count,
            ColumnLength.COLUMN_LENGTH_TOKENS: int(layout.tokens[-1]),
            ColumnLength.COLUMN_LENGTH_SCORED_TOKENS: int(layout.scored[-1]),
            ColumnLength.COLUMN_LENGTH_ALTERNATIVES: int(layout.alternatives[-1]),
            ColumnLength.COLUMN_LENGTH_PROPOSALS: int(layout.proposals[-1]),
        }
        return all(self.columns[column.name].size == demanded[column.length] for column in COLUMNS)

    def rows(self) -> Iterator[Row]:
        """Yield the rows in the order of the columns."""
        return map(self.row, range(self.row_count))

    def row(self, index: int) -> Row:
        """Return one row, by its place in the columns."""
        layout = self._laid_out()
        tokens = slice(*layout.tokens[index : index + 2])
        scored = slice(*layout.scored[index : index + 2])
        alternatives = slice(*layout.alternatives[index : index + 2])
        shape = (-1, self.top_ks[index]) if self.top_ks[index] else (int(self.token_counts[index]), 0)
        return Row(
            int(self.request_keys[index]),
            int(self.batch_indices[index]),
            int(self.positions[index]),
            RowStatus(self.statuses[index]),
            int(self.draft_token_counts[index]),
            Scoring(self.scorings[index]),
            self.token_ids[tokens],
            self.logprobs[scored],
            self.ranks[scored],
            self.alternative_token_ids[alternatives].reshape(shape),
            self.alternative_logprobs[alternatives].reshape(shape),
            self.proposal_token_ids[slice(*layout.proposals[index : index + 2])],
        )

    def in_batch_order(self) -> Self:
        """Return the batch with its rows in original batch order, every column permuted together."""
        indices = self.batch_indices
        if bool((indices[1:] > indices[:-1]).all()):
            return self
        return self._gathered(np.argsort(indices, kind="stable"), self.header)

    def select(self, rows: npt.ArrayLike) -> Self:
        """Return some of the rows, by their places in the columns, as a batch that says it is a selection."""
        return self._gathered(np.asarray(rows, np.intp), self.header._replace(selection=True))

    def _gathered(self, rows: Index, header: BatchHeader) -> Self:
        """Return a batch of these rows in this order: the only code that moves columns, and it moves them all."""
        layout = self._laid_out()
        elements: dict[int, Index] = {
            ColumnLength.COLUMN_LENGTH_ROWS: rows,
            ColumnLength.COLUMN_LENGTH_TOKENS: _of(rows, layout.tokens),
            ColumnLength.COLUMN_LENGTH_SCORED_TOKENS: _of(rows, layout.scored),
            ColumnLength.COLUMN_LENGTH_ALTERNATIVES: _of(rows, layout.alternatives),
            ColumnLength.COLUMN_LENGTH_PROPOSALS: _of(rows, layout.proposals),
        }
        moved = {column.name: getattr(self, column.name)[elements[column.length]] for column in COLUMNS}
        return self.of_views(header, moved)

    def _laid_out(self) -> "_Layout":
        if self._layout is None:
            self._layout = _Layout.of(self)
        return self._layout


class _Layout(NamedTuple):
    """Where each row's elements begin in the ragged columns; one more entry says where the last ends."""

    tokens: Index
    scored: Index
    alternatives: Index
    proposals: Index

    @classmethod
    def of(cls, batch: LogprobBatch) -> "_Layout":
        """Return the layout that the batch's counts demand."""
        counts = batch.token_counts.astype(np.intp)
        return cls(
            starts_of(counts),
            starts_of(counts * (batch.scorings != Scoring.NONE)),
            starts_of(counts * batch.top_ks),
            starts_of(batch.proposal_counts),
        )


def _of(rows: Index, starts: Index) -> Index:
    return elements_of(rows, np.diff(starts), starts)


def _fitted(column: Column, values: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return values as the column's type, or a ContractError where they are not such values."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise ContractError(column.name, "one value for each element", str(error), rule=Rule.TYPE) from None
    if array.ndim != 1:
        raise ContractError(column.name, "one dimension", f"shape {array.shape}", rule=Rule.TYPE)
    if not array.size:
        return column.empty
    wanted = "fiu" if column.dtype.kind == "f" else "iu"
    if array.dtype.kind not in wanted:
        raise ContractError(column.name, f"values of {column.dtype.name}", array.dtype.name, rule=Rule.TYPE)
    if column.dtype.kind != "f":
        _refuse_wrapping(column, array)
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite, which the checks refuse
        return array.astype(column.dtype)


def _refuse_wrapping(column: Column, array: npt.NDArray[Any]) -> None:
    """Refuse integers that a narrower type would turn into other ones."""
    lowest, highest = int(array.min()), int(array.max())
    highest_held = (1 << 8 * column.item_bytes) - 1
    if lowest < 0:
        raise ContractError(f"{column.name}[{int(array.argmin())}]", column.min, lowest, rule=Rule.MIN)
    if highest > highest_held:
        raise ContractError(f"{column.name}[{int(array.argmax())}]", column.max, highest, rule=Rule.MAX)
