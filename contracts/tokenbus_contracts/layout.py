"""Ragged columns: which elements of a column belong to which rows."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.generated.bounds_pb2 import ColumnLength
from tokenbus_contracts.generated.enums import Scoring
from tokenbus_contracts.schema import COLUMNS

if TYPE_CHECKING:
    from tokenbus_contracts.batch import LogprobBatch

Index = npt.NDArray[np.intp]

_ROWS = ColumnLength.COLUMN_LENGTH_ROWS
_TOKENS = ColumnLength.COLUMN_LENGTH_TOKENS
_SCORED_TOKENS = ColumnLength.COLUMN_LENGTH_SCORED_TOKENS
_ALTERNATIVES = ColumnLength.COLUMN_LENGTH_ALTERNATIVES
_PROPOSALS = ColumnLength.COLUMN_LENGTH_PROPOSALS


class Layout:
    """Where each row's elements begin in each kind of column; a ContractError if a column is not as long as counted."""

    __slots__ = ("_starts",)

    def __init__(self, batch: "LogprobBatch") -> None:
        """Count, and compare with what is there."""
        rows = batch.row_count
        _check_lengths(batch, {_ROWS: rows})
        counts = batch.token_counts.astype(np.intp)
        self._starts: dict[int, Index] = {
            _ROWS: np.arange(rows + 1, dtype=np.intp),
            _TOKENS: _starts_of(counts),
            _SCORED_TOKENS: _starts_of(counts * (batch.scorings != Scoring.NONE)),
            _ALTERNATIVES: _starts_of(counts * batch.top_ks),
            _PROPOSALS: _starts_of(batch.proposal_counts),
        }
        _check_lengths(batch, {length: int(starts[-1]) for length, starts in self._starts.items()})

    def span(self, length: int, row: int) -> slice:
        """Return where one row's elements are, in the columns of one kind of length."""
        begin, end = self._starts[length][row : row + 2].tolist()
        return slice(begin, end)

    def elements(self, rows: Index) -> dict[int, Index]:
        """Return where the elements of some rows are, in the order in which the rows are named, by kind of length."""
        return {length: _elements_of(rows, starts) for length, starts in self._starts.items()}


def _check_lengths(batch: "LogprobBatch", wanted: dict[int, int]) -> None:
    for column in COLUMNS:
        length = getattr(batch, column.name).size
        if length != wanted.get(column.length, length):
            limit = f"{wanted[column.length]} elements, as counted"
            raise ContractError(column.name, limit, length, rule=Rule.LENGTH)


def _starts_of(counts: npt.NDArray[np.unsignedinteger | np.signedinteger]) -> Index:
    starts = np.zeros(counts.size + 1, np.intp)
    np.add.accumulate(counts, dtype=np.intp, out=starts[1:])
    return starts


def _elements_of(rows: Index, starts: Index) -> Index:
    begins = starts[rows]
    lengths = starts[rows + 1] - begins
    # Each row's run is a range of its own: shift one long range by where each row begins in both.
    return np.arange(lengths.sum(), dtype=np.intp) + np.repeat(begins - _starts_of(lengths)[:-1], lengths)
