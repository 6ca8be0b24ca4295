"""Layout: the range of elements of each row in each column."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.extras import Extra
from tokenbus_contracts.generated.bounds_pb2 import ColumnLength
from tokenbus_contracts.generated.columns import ColumnArrays
from tokenbus_contracts.generated.enums import RowStatus, Scoring
from tokenbus_contracts.schema import BASE_COLUMNS, COLUMNS, Column

Index = npt.NDArray[np.intp]

_ROWS = ColumnLength.COLUMN_LENGTH_ROWS
_TOKENS = ColumnLength.COLUMN_LENGTH_TOKENS
_ALTERNATIVES = ColumnLength.COLUMN_LENGTH_ALTERNATIVES
_ROWS_OR_NONE = ColumnLength.COLUMN_LENGTH_ROWS_OR_NONE
_MASKED_TOKENS = ColumnLength.COLUMN_LENGTH_MASKED_TOKENS
_MASK_TOKENS = ColumnLength.COLUMN_LENGTH_MASK_TOKENS


class Layout:
    """The index of each row's first element in each kind of column. A wrong length raises a ContractError."""

    __slots__ = ("_mask_starts", "_per_token", "starts")

    def __init__(self, batch: ColumnArrays, *, has_extras: bool) -> None:
        rows = batch.request_ids.size
        present = COLUMNS if has_extras else BASE_COLUMNS
        _check_lengths(batch, present, {_ROWS: rows})
        counts = batch.token_counts.astype(np.intp)
        # The number of elements that each token of a row has, for each kind of column and each row.
        self._per_token: dict[int, Index] = {
            _TOKENS: np.ones(rows, np.intp),
            ColumnLength.COLUMN_LENGTH_SCORED_TOKENS: (batch.scorings != Scoring.NONE).astype(np.intp),
            _ALTERNATIVES: batch.top_ks.astype(np.intp),
        }
        self.starts: dict[int, Index] = {
            _ROWS: np.arange(rows + 1, dtype=np.intp),
            **{length: _starts_of(counts * each) for length, each in self._per_token.items()},
            ColumnLength.COLUMN_LENGTH_PROPOSALS: _starts_of(batch.proposal_counts),
        }
        if batch.stops.size:
            self.starts[ColumnLength.COLUMN_LENGTH_STOPPED_ROWS] = _starts_of(
                (batch.statuses == RowStatus.FINISHED_STOP).astype(np.intp)
            )
        if has_extras:
            self._lay_out_extras(batch, counts)
        _check_lengths(batch, present, {length: int(starts[-1]) for length, starts in self.starts.items()})

    def _lay_out_extras(self, batch: ColumnArrays, counts: Index) -> None:
        rows = counts.size
        nothing = np.zeros(rows, np.intp)
        _check_lengths(batch, COLUMNS, {_ROWS_OR_NONE: rows})
        extras, given, bounds = (
            column.astype(np.intp) if column.size else nothing
            for column in (batch.extras, batch.given_counts, batch.mask_bounds)
        )
        asked: dict[int, Index] = {
            ColumnLength.COLUMN_LENGTH_OTHER_LOGPROBS: extras & Extra.OTHER_LOGPROB,
            ColumnLength.COLUMN_LENGTH_ENTROPIES: extras // Extra.ENTROPY & 1,
            ColumnLength.COLUMN_LENGTH_GIVEN_LOGPROBS: given,
            _MASKED_TOKENS: np.minimum(bounds, 1),
        }
        self._per_token |= asked
        self.starts |= {length: _starts_of(counts * each) for length, each in asked.items()}
        self.starts |= {_ROWS_OR_NONE: self.starts[_ROWS], ColumnLength.COLUMN_LENGTH_GIVEN_TOKENS: _starts_of(given)}
        masked = self.starts[_MASKED_TOKENS]
        _check_lengths(batch, COLUMNS, {_MASKED_TOKENS: int(masked[-1])})
        sizes = batch.mask_sizes.astype(np.intp)
        self._mask_starts = _starts_of(np.where(sizes <= np.repeat(bounds, np.diff(masked)), sizes, 0))
        self.starts[_MASK_TOKENS] = self._mask_starts[masked]

    def elements(self, rows: Index) -> dict[int, Index]:
        """Return the element indexes of the given rows, in the order of `rows`, for each kind of column."""
        return {
            length: _ranges(starts[rows], starts[rows + 1] - starts[rows]) for length, starts in self.starts.items()
        }

    def elements_between(self, begins: Index, ends: Index) -> dict[int, Index]:
        """Return the element indexes of each row's token range, for each kind of column."""
        found = {length: np.arange(starts[-1], dtype=np.intp) for length, starts in self.starts.items()}
        for length, each in self._per_token.items():
            found[length] = _ranges(self.starts[length][:-1] + begins * each, (ends - begins) * each)
        if _MASK_TOKENS in found:
            first = self.starts[_MASKED_TOKENS][:-1] + begins * self._per_token[_MASKED_TOKENS]
            behind = first + (ends - begins) * self._per_token[_MASKED_TOKENS]
            found[_MASK_TOKENS] = _ranges(
                self._mask_starts[first], self._mask_starts[behind] - self._mask_starts[first]
            )
        return found


def _check_lengths(batch: ColumnArrays, present: Sequence[Column], wanted: dict[int, int]) -> None:
    for column in present:
        length = getattr(batch, column.name).size
        if length != wanted.get(column.length, length) and (length or column.length != _ROWS_OR_NONE):
            limit = f"{wanted[column.length]} elements, as counted"
            raise ContractError(column.name, limit, length, rule=Rule.LENGTH)


def _starts_of(counts: npt.NDArray[np.unsignedinteger | np.signedinteger]) -> Index:
    starts = np.zeros(counts.size + 1, np.intp)
    np.add.accumulate(counts, dtype=np.intp, out=starts[1:])
    return starts


def _ranges(begins: Index, lengths: Index) -> Index:
    # Start with consecutive numbers. Then shift each range, so that its first number is the range's begin.
    return np.arange(lengths.sum(), dtype=np.intp) + np.repeat(begins - _starts_of(lengths)[:-1], lengths)
