"""Ragged columns: which elements of a column belong to which rows."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.generated.bounds_pb2 import ColumnLength
from tokenbus_contracts.generated.enums import RowStatus, Scoring
from tokenbus_contracts.schema import COLUMNS

if TYPE_CHECKING:
    from tokenbus_contracts.batch import LogprobBatch

Index = npt.NDArray[np.intp]

_ROWS = ColumnLength.COLUMN_LENGTH_ROWS
_TOKENS = ColumnLength.COLUMN_LENGTH_TOKENS
_SCORED_TOKENS = ColumnLength.COLUMN_LENGTH_SCORED_TOKENS
_ALTERNATIVES = ColumnLength.COLUMN_LENGTH_ALTERNATIVES
_PROPOSALS = ColumnLength.COLUMN_LENGTH_PROPOSALS
_STOPPED_ROWS = ColumnLength.COLUMN_LENGTH_STOPPED_ROWS
_NONE = np.zeros(0, np.intp)


class Layout:
    """Where each row's elements begin in each kind of column; a ContractError if a column is not as long as counted."""

    __slots__ = ("_per_token", "_starts")

    def __init__(self, batch: "LogprobBatch") -> None:
        rows = batch.row_count
        _check_lengths(batch, {_ROWS: rows})
        counts = batch.token_counts.astype(np.intp)
        # How many elements a token has in each kind of column, row by row.
        self._per_token: dict[int, Index] = {
            _TOKENS: np.ones(rows, np.intp),
            _SCORED_TOKENS: (batch.scorings != Scoring.NONE).astype(np.intp),
            _ALTERNATIVES: batch.top_ks.astype(np.intp),
        }
        self._starts: dict[int, Index] = {
            _ROWS: np.arange(rows + 1, dtype=np.intp),
            **{length: _starts_of(counts * each) for length, each in self._per_token.items()},
            _PROPOSALS: _starts_of(batch.proposal_counts),
        }
        if batch.stops.size:
            self._starts[_STOPPED_ROWS] = _starts_of((batch.statuses == RowStatus.FINISHED_STOP).astype(np.intp))
        _check_lengths(batch, {length: int(starts[-1]) for length, starts in self._starts.items()})

    def elements(self, rows: Index) -> dict[int, Index]:
        """Return where the elements of some rows are, in the order in which the rows are named, by kind of length."""
        found: dict[int, Index] = {_STOPPED_ROWS: _NONE}
        for length, starts in self._starts.items():
            found[length] = _ranges(starts[rows], starts[rows + 1] - starts[rows])
        return found

    def elements_between(self, begins: Index, ends: Index) -> dict[int, Index]:
        """Return where the elements of each row's tokens from one place to another are, by kind of length."""
        found: dict[int, Index] = {_STOPPED_ROWS: _NONE}
        found |= {length: np.arange(starts[-1], dtype=np.intp) for length, starts in self._starts.items()}
        for length, each in self._per_token.items():
            found[length] = _ranges(self._starts[length][:-1] + begins * each, (ends - begins) * each)
        return found


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


def _ranges(begins: Index, lengths: Index) -> Index:
    # Each row's run is a range of its own: shift one long range by where each row begins in both.
    return np.arange(lengths.sum(), dtype=np.intp) + np.repeat(begins - _starts_of(lengths)[:-1], lengths)
