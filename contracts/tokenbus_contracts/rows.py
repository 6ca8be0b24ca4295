"""Row: the tokens of one request in a batch, created on demand."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, repeat
from operator import getitem, mul
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.columns import MessageColumns
from tokenbus_contracts.extras import Extras
from tokenbus_contracts.generated.enums import RowStatus, Scoring

Array = npt.NDArray[Any]


class Parts(Protocol):
    """The parts of a column: part i has the elements of row i."""

    def __getitem__(self, row: int, /) -> Any: ...  # noqa: ANN401 - an array
    def __iter__(self) -> Iterator[Any]: ...


Cutter = Callable[[Array], Parts]
"""A function that cuts a column into parts, one for each row."""
_STATUSES, _SCORINGS = list(RowStatus), list(Scoring)  # status or scoring n has index n


class Row(NamedTuple):
    """The tokens of one request in a batch. The arrays are views of the batch's columns.

    Example:
        async with tokenbus.connect(address) as client:
            async for row in client.generate([1, 2, 3], max_tokens=4, top_logprobs=0).rows():
                print(row.position, row.token_ids.tolist(), row.logprobs.tolist())
    """

    request_id: int
    """The id of the request."""
    batch_index: int
    """The row's index in the engine's batch."""
    position: int
    """The zero-based position of the row's first token in the request's output."""
    status: RowStatus
    """The state of the request after the step."""
    draft_token_count: int
    """The number of draft tokens that the step verified."""
    scoring: Scoring
    """The values that tokens have besides their ids."""
    token_ids: npt.NDArray[np.uint32]
    """The ids of the row's tokens."""
    logprobs: npt.NDArray[np.float32]
    """The logprob of each token. Empty if the row is not scored."""
    ranks: npt.NDArray[np.uint32]
    """The rank of each token: 1 for the most probable token. Empty if the row is not scored."""
    alternative_token_ids: npt.NDArray[np.uint32]
    """The alternatives' ids for each token, most probable first."""
    alternative_logprobs: npt.NDArray[np.float32]
    """The alternatives' logprobs for each token."""
    proposal_token_ids: npt.NDArray[np.uint32]
    """The draft tokens for the next step to verify."""
    stop: int
    """The row's value in the column `stops`, or 0 if there is none."""
    extras: Extras | None
    """The row's extra values, or None if the row has none."""


_STATUS, _SCORING = map(Row._fields.index, ("status", "scoring"))


class Rows:
    """The rows of a batch. The lengths of the batch's columns must fit its counts.

    Rows are not cached, because 256 rows made in advance would leave the CPU's cache before a consumer reads them.
    """

    __slots__ = ("_columns", "_count")

    def __init__(
        self,
        array: Callable[[str], Array],
        numbers: Callable[[str], Sequence[int]],
        extras: Sequence[Extras | None] | None,
    ) -> None:
        """Cut the columns into parts, one for each row.

        Args:
            array: a function that returns a column by its name.
            numbers: a function that returns the values of an integer column by its name.
            extras: the extras of each row, or None if no row has extras.
        """
        counts, top_ks = numbers("token_counts"), numbers("top_ks")
        statuses, scorings = numbers("statuses"), numbers("scorings")
        tokens = scored = _cutter(counts)
        if Scoring.NONE in scorings:
            pairs = zip(counts, scorings, strict=True)
            scored = _cutter([count * (scoring != Scoring.NONE) for count, scoring in pairs])
        self._count = len(counts)
        self._columns = (  # must follow the order of Row's fields
            numbers("request_ids"),
            numbers("batch_indices"),
            numbers("positions"),
            statuses,
            numbers("draft_token_counts"),
            scorings,
            tokens(array("token_ids")),
            scored(array("logprobs")),
            scored(array("ranks")),
            _tables(array("alternative_token_ids"), counts, top_ks, tokens),
            _tables(array("alternative_logprobs"), counts, top_ks, tokens),
            _cutter(numbers("proposal_counts"))(array("proposal_token_ids")),
            _stops(numbers("stops"), statuses),
            [None] * len(counts) if extras is None else extras,
        )

    def row(self, index: int) -> Row:
        if not 0 <= index < self._count:
            raise IndexError(f"row {index} of a batch of {self._count}")
        values: list[Any] = [*map(getitem, self._columns, repeat(index))]
        values[_STATUS], values[_SCORING] = _STATUSES[values[_STATUS]], _SCORINGS[values[_SCORING]]
        return tuple.__new__(Row, values)

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows in order. Building rows column by column takes half the time of building them row by row."""
        columns: list[Any] = [*self._columns]
        columns[_STATUS] = map(_STATUSES.__getitem__, columns[_STATUS])
        columns[_SCORING] = map(_SCORINGS.__getitem__, columns[_SCORING])
        return map(tuple.__new__, repeat(Row), zip(*columns, strict=True))


class OnlyRow:
    """The row of a message with a single row. OnlyRow is faster than `Rows`."""

    __slots__ = ("_row",)

    def __init__(self, columns: MessageColumns, extras: Sequence[Extras | None] | None) -> None:
        key, batch_index, position, status, count, draft_count, _, scoring, top_k = columns.first()
        array = columns.array
        values = (
            key,
            batch_index,
            position,
            _STATUSES[status],
            draft_count,
            _SCORINGS[scoring],
            array("token_ids"),
            array("logprobs"),
            array("ranks"),
            array("alternative_token_ids").reshape(count, top_k),
            array("alternative_logprobs").reshape(count, top_k),
            array("proposal_token_ids"),
            next(iter(columns.numbers("stops")), 0),
            None if extras is None else extras[0],
        )
        self._row = tuple.__new__(Row, values)

    def row(self, index: int) -> Row:
        if index:
            raise IndexError(f"row {index} of a batch of 1")
        return self._row

    def __iter__(self) -> Iterator[Row]:
        return iter((self._row,))


class _Ragged:
    """The parts of a column, if rows have different numbers of elements."""

    __slots__ = ("_column", "_places")

    def __init__(self, column: Array, places: Sequence[slice]) -> None:
        self._column = column
        self._places = places

    def __getitem__(self, row: int, /) -> Array:
        return self._column[self._places[row]]

    def __iter__(self) -> Iterator[Array]:
        return map(self._column.__getitem__, self._places)


class _Tables:
    """The parts of a column as tables. Each table belongs to one row, and has one table row for each token."""

    __slots__ = ("_parts", "_shapes")

    def __init__(self, parts: Parts, shapes: Sequence[tuple[int, int]]) -> None:
        self._parts = parts
        self._shapes = shapes

    def __getitem__(self, row: int, /) -> Array:
        table: Array = self._parts[row].reshape(self._shapes[row])
        return table

    def __iter__(self) -> Iterator[Array]:
        return map(np.ndarray.reshape, self._parts, self._shapes)


def _cutter(counts: Sequence[int]) -> Cutter:
    """Return a function that cuts a column into parts. Part i has `counts[i]` elements."""
    rows = len(counts)
    if not rows or counts.count(counts[0]) != rows:
        ends = list(accumulate(counts))
        places = list(map(slice, [0, *ends], ends))
        return lambda column: _Ragged(column, places)
    if not counts[0]:
        return lambda column: [column] * rows  # all parts are empty, like the column
    return lambda column: column.reshape(rows, counts[0], *column.shape[1:])


def _tables(column: Array, counts: Sequence[int], top_ks: Sequence[int], tokens: Cutter) -> Parts:
    """Return each row's alternatives as a table with one table row for each token."""
    rows = len(counts)
    if rows and top_ks.count(top_ks[0]) != rows:
        return _Tables(_cutter(list(map(mul, counts, top_ks)))(column), list(zip(counts, top_ks, strict=True)))
    if column.size:
        return tokens(column.reshape(-1, top_ks[0]))
    empty = {count: column.reshape(count, top_ks[0]) for count in set(counts)}
    return [*empty.values()] * rows if len(empty) == 1 else [empty[count] for count in counts]


def _stops(stops: Sequence[int], statuses: Sequence[int]) -> Sequence[int]:
    """Return each row's value of `stops`, or zero. A nonempty column `stops` has values only for stopped rows."""
    if not stops:
        return bytes(len(statuses))
    each = iter(stops)
    return [next(each) if status == RowStatus.FINISHED_STOP else 0 for status in statuses]
