"""Row: one request's share of a batch, made when it is asked for."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, repeat
from operator import mul
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.columns import MessageColumns
from tokenbus_contracts.extras import Extras
from tokenbus_contracts.generated.enums import RowStatus, Scoring

Array = npt.NDArray[Any]


class Parts(Protocol):
    """Each row's part of a column."""

    def __getitem__(self, row: int, /) -> Any: ...  # noqa: ANN401 - an array, as those of a list are too
    def __iter__(self) -> Iterator[Any]: ...


Cutter = Callable[[Array], Parts]
"""Returns each row's part of a column."""
_STATUSES, _SCORINGS = list(RowStatus), list(Scoring)  # by value, of which none is left out


class Row(NamedTuple):
    """One request's share of a batch; the arrays are views of the batch's columns.

    Example:
        async with tokenbus.connect(address) as client:
            async for row in client.generate([1, 2, 3], max_tokens=4, top_logprobs=0).rows():
                print(row.position, row.token_ids.tolist(), row.logprobs.tolist())
    """

    key: int
    """The request's id."""
    batch_index: int
    """Its place in the engine's batch."""
    position: int
    """The place of its first token among the request's generated tokens, from 0."""
    status: RowStatus
    """Whether its request goes on, or how it ended."""
    draft_token_count: int
    """How many draft tokens were verified in this step."""
    scoring: Scoring
    """Which values its tokens have."""
    token_ids: npt.NDArray[np.uint32]
    """Of each token that its request got in this step."""
    logprobs: npt.NDArray[np.float32]
    """Of each token, or empty where the row is not scored."""
    ranks: npt.NDArray[np.uint32]
    """Of each token, by probability from 1, or empty as logprobs are."""
    alternative_token_ids: npt.NDArray[np.uint32]
    """A line for each token, the most probable first."""
    alternative_logprobs: npt.NDArray[np.float32]
    """As alternative_token_ids."""
    proposal_token_ids: npt.NDArray[np.uint32]
    """The draft tokens that the next step verifies."""
    stop: int
    """Which of its request's own stops ended it, as the column `stops` has it; 0: none, or not known."""
    extras: Extras | None
    """What its request asked for beyond that; None: nothing."""


class Rows:
    """The rows of a batch whose columns are as long as its counts demand.

    None is kept once it was made: 256 rows that wait for each other leave the processor's cache before they are read.
    """

    __slots__ = ("_count", "_numbers", "_parts")

    def __init__(
        self,
        array: Callable[[str], Array],
        numbers: Callable[[str], Sequence[int]],
        extras: Sequence[Extras | None] | None,
    ) -> None:
        """Cut the columns into the rows' parts.

        Args:
            array: returns a column by its name.
            numbers: returns an integer column's values by its name.
            extras: those of each row, where any has some.
        """
        counts, top_ks = numbers("token_counts"), numbers("top_ks")
        statuses, scorings = numbers("statuses"), numbers("scorings")
        tokens = scored = _cutter(counts)
        if Scoring.NONE in scorings:
            pairs = zip(counts, scorings, strict=True)
            scored = _cutter([count * (scoring != Scoring.NONE) for count, scoring in pairs])
        self._count = len(counts)
        self._numbers = (
            numbers("request_ids"),
            numbers("batch_indices"),
            numbers("positions"),
            statuses,
            numbers("draft_token_counts"),
            scorings,
        )
        self._parts = (
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
        """Return one of them; IndexError: there is none."""
        if not 0 <= index < self._count:
            raise IndexError(f"row {index} of a batch of {self._count}")
        keys, batch_indices, positions, statuses, draft_counts, scorings = self._numbers
        token_ids, logprobs, ranks, alternative_ids, alternative_logprobs, proposals, stops, extras = self._parts
        values = (
            keys[index],
            batch_indices[index],
            positions[index],
            _STATUSES[statuses[index]],
            draft_counts[index],
            _SCORINGS[scorings[index]],
            token_ids[index],
            logprobs[index],
            ranks[index],
            alternative_ids[index],
            alternative_logprobs[index],
            proposals[index],
            stops[index],
            extras[index],
        )
        return tuple.__new__(Row, values)

    def __iter__(self) -> Iterator[Row]:
        """Yield them in order, a column at a time: that takes half as long as one row after the other."""
        keys, batch_indices, positions, statuses, draft_counts, scorings = self._numbers
        named = (map(_STATUSES.__getitem__, statuses), draft_counts, map(_SCORINGS.__getitem__, scorings))
        columns = zip(keys, batch_indices, positions, *named, *self._parts, strict=True)
        return map(tuple.__new__, repeat(Row), columns)


class OnlyRow:
    """The row of a message that has no other: for one, what `Rows` makes for many would cost more than the row."""

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
        """Return it; IndexError: there is no other."""
        if index:
            raise IndexError(f"row {index} of a batch of 1")
        return self._row

    def __iter__(self) -> Iterator[Row]:
        return iter((self._row,))


class _Ragged:
    """A column in parts of different lengths."""

    __slots__ = ("_column", "_places")

    def __init__(self, column: Array, places: Sequence[slice]) -> None:
        self._column = column
        self._places = places

    def __getitem__(self, row: int, /) -> Array:
        return self._column[self._places[row]]

    def __iter__(self) -> Iterator[Array]:
        return map(self._column.__getitem__, self._places)


class _Tables:
    """Parts of different lengths, each with a line for each of its row's tokens."""

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
    """Return what cuts a column into the rows' parts, which have so many elements each."""
    rows = len(counts)
    if not rows or counts.count(counts[0]) != rows:
        ends = list(accumulate(counts))
        places = list(map(slice, [0, *ends], ends))
        return lambda column: _Ragged(column, places)
    if not counts[0]:
        return lambda column: [column] * rows  # each part is as empty as the column
    return lambda column: column.reshape(rows, counts[0], *column.shape[1:])


def _tables(column: Array, counts: Sequence[int], top_ks: Sequence[int], tokens: Cutter) -> Parts:
    """Return each row's alternatives, a line for each of its tokens."""
    rows = len(counts)
    if rows and top_ks.count(top_ks[0]) != rows:
        return _Tables(_cutter(list(map(mul, counts, top_ks)))(column), list(zip(counts, top_ks, strict=True)))
    if column.size:
        return tokens(column.reshape(-1, top_ks[0]))
    empty = {count: column.reshape(count, top_ks[0]) for count in set(counts)}
    return [*empty.values()] * rows if len(empty) == 1 else [empty[count] for count in counts]


def _stops(stops: Sequence[int], statuses: Sequence[int]) -> Sequence[int]:
    """Return each row's stop: the column has those of the stopped rows alone, or none."""
    if not stops:
        return bytes(len(statuses))
    each = iter(stops)
    return [next(each) if status == RowStatus.FINISHED_STOP else 0 for status in statuses]
