"""LogprobBatch: one step's tokens as columns."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.fitting import fitted, kind_of
from tokenbus_contracts.generated.enums import RowStatus, Scoring
from tokenbus_contracts.header import BatchHeader
from tokenbus_contracts.layout import Index, Layout
from tokenbus_contracts.schema import COLUMN, COLUMNS

_TYPES = [(column.name, column.dtype) for column in COLUMNS]
_STATUSES, _SCORINGS = list(RowStatus), list(Scoring)  # by value, of which none is left out
STOP_TOKEN, FIRST_STOP_TEXT = 1, 2
"""What the column `stops` has for a stop token, and for the first stop text; those of the others follow."""
_set = object.__setattr__  # a batch's own is for others, and refuses


class Row(NamedTuple):
    """One request's share of a batch; the arrays are views of the batch's columns.

    `logprobs` and `ranks` are empty where the row is not scored; the alternatives are one line a token. `stop` says
    which of its request's own stops ended it, as the column `stops` has it; 0: none, or not known.

    Example:
        async with tokenbus.connect(address) as client:
            async for row in client.generate([1, 2, 3], max_tokens=4, top_logprobs=0).rows():
                print(row.position, row.token_ids.tolist(), row.logprobs.tolist())
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
    stop: int


class LogprobBatch:
    """One step's tokens, or one part of them, as parallel columns.

    logprob_batch.proto says what each column holds, and in which order. A column may be given as anything
    numpy reads; what does not fit the column's type is a ContractError. `encode` and `decode` check
    everything else. A batch is not changed once it is made: its arrays may be views of a message.

    Example:
        raw = tokenbus.ValueKind.RAW_LOGPROBS
        header = tokenbus.BatchHeader("worker-0", epoch=1, sequence=1, step=1, step_rows=1, value_kind=raw)
        batch = tokenbus.LogprobBatch(
            header,
            request_keys=[7], batch_indices=[0], positions=[0], statuses=[tokenbus.RowStatus.ACTIVE],
            token_counts=[2], draft_token_counts=[1], proposal_counts=[0], scorings=[tokenbus.Scoring.FULL], top_ks=[0],
            token_ids=[11, 12], logprobs=[-0.25, -1.5], ranks=[1, 2],
        )
        for row in batch.in_batch_order().rows():
            print(row.key, row.token_ids, row.logprobs)
    """

    __slots__ = ("_layout", "header", *(column.name for column in COLUMNS))

    _layout: Layout | None
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
    stops: npt.NDArray[np.uint8]

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
        stops: npt.ArrayLike = (),
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
            stops,
        )
        _set(self, "header", header)
        _set(self, "_layout", None)
        for (name, dtype), values in zip(_TYPES, given, strict=True):
            fits = type(values) is np.ndarray and values.dtype is dtype and values.ndim == 1
            _set(self, name, values if fits else fitted(COLUMN[name], values))

    @classmethod
    def of_views(cls, header: BatchHeader, columns: dict[str, npt.NDArray[Any]]) -> Self:
        """Make a batch of all its columns, each an array of its column's own type."""
        batch = cls.__new__(cls)
        _set(batch, "header", header)
        _set(batch, "_layout", None)
        for name, values in columns.items():
            _set(batch, name, values)
        return batch

    def headed(self, header: BatchHeader) -> Self:
        """Return the same columns under another header."""
        batch = type(self).__new__(type(self))
        for name in self.__slots__:
            _set(batch, name, getattr(self, name))
        _set(batch, "header", header)
        return batch

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse: what has been checked once must not become something else."""
        raise AttributeError(f"a batch is not changed once it is made; make another one with another {name}")

    def __delattr__(self, name: str) -> None:
        """Refuse, as above."""
        raise AttributeError(f"a batch is not changed once it is made; it keeps its {name}")

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
        """Return whether every column is as long as the counts demand; if not, elements cannot be assigned to rows."""
        try:
            self._laid_out()
        except ContractError:
            return False
        return True

    def rows(self) -> Iterator[Row]:
        """Yield the rows in the order of the columns."""
        return map(self.row, range(self.row_count))

    def row(self, index: int) -> Row:
        """Return one row, by its place in the columns."""
        if not 0 <= index < self.row_count:
            raise IndexError(f"row {index} of a batch of {self.row_count}")
        place = self._laid_out().rows[index]
        top_k = int(self.top_ks[index])
        table = (-1, top_k) if top_k else (int(self.token_counts[index]), 0)
        return Row(
            int(self.request_keys[index]),
            int(self.batch_indices[index]),
            int(self.positions[index]),
            _STATUSES[self.statuses[index]],
            int(self.draft_token_counts[index]),
            _SCORINGS[self.scorings[index]],
            self.token_ids[place.tokens],
            self.logprobs[place.scored_tokens],
            self.ranks[place.scored_tokens],
            self.alternative_token_ids[place.alternatives].reshape(table),
            self.alternative_logprobs[place.alternatives].reshape(table),
            self.proposal_token_ids[place.proposals],
            self.stop(index) if self.stops.size else 0,
        )

    def stop(self, index: int) -> int:
        """Return which of its request's own stops ended a row, by its place in the columns; 0: none, or not known."""
        if not self.stops.size or self.statuses[index] != RowStatus.FINISHED_STOP:
            return 0
        return int(self.stops[np.count_nonzero(self.statuses[:index] == RowStatus.FINISHED_STOP)])

    def in_batch_order(self) -> Self:
        """Return the batch with its rows in original batch order, every column permuted together."""
        indices = self.batch_indices
        if bool((indices[1:] > indices[:-1]).all()):
            return self
        return self._gathered(np.argsort(indices, kind="stable"), self.header)

    def select(self, rows: npt.ArrayLike) -> Self:
        """Return some of the rows, by their places in the columns, as a batch that says it is a selection."""
        places = np.asarray(rows)
        if not places.size:
            places = np.zeros(0, np.intp)
        if places.dtype.kind not in "iu" or places.ndim != 1:
            raise ContractError("rows", "places in the columns", kind_of(places), rule=Rule.TYPE)
        if places.size and not 0 <= int(places.min()) <= int(places.max()) < self.row_count:
            beyond = int(places.min()) if int(places.min()) < 0 else int(places.max())
            raise ContractError("rows", f"places from 0 to {self.row_count - 1}", beyond, rule=Rule.MAX)
        if np.unique(places).size != places.size:
            raise ContractError("rows", "each place once", "one of them twice", rule=Rule.UNIQUE)
        return self._gathered(places.astype(np.intp), self.header._replace(selection=True))

    def between(self, begins: npt.ArrayLike, ends: npt.ArrayLike) -> Self:
        """Return the batch with each row's tokens from one place to before another alone, everything of them together.

        The positions move with the first token that is left. Statuses stay as they are, so an active row must
        keep a token to be valid.
        """
        first, last = np.asarray(begins, np.intp), np.asarray(ends, np.intp)
        if first.shape != (self.row_count,) or last.shape != first.shape:
            raise ContractError("begins", f"{self.row_count} places, one for each row", first.size, rule=Rule.LENGTH)
        if not bool(((first >= 0) & (first <= last) & (last <= self.token_counts)).all()):
            raise ContractError("begins", "places in order within each row's tokens", "others", rule=Rule.MAX)
        kept = self._taken(self._laid_out().elements_between(first, last), self.header)
        _set(kept, "positions", self.positions + first.astype(np.uint32))
        _set(kept, "token_counts", (last - first).astype(np.uint8))
        return kept

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the parts of one step as one batch, whose header is the last part's, in original batch order."""
        header = parts[-1].header._replace(part_index=0, part_count=1)
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name, _ in _TYPES}
        if columns["stops"].size:
            columns["stops"] = np.concatenate([part.stops if part.stops.size else _no_stops(part) for part in parts])
        return cls.of_views(header, columns).in_batch_order()

    def _gathered(self, rows: Index, header: BatchHeader) -> Self:
        """Return a batch of these rows in this order."""
        return self._taken(self._laid_out().elements(rows), header)

    def _taken(self, elements: dict[int, Index], header: BatchHeader) -> Self:
        """Return a batch of these elements: the only code that moves columns, and it moves them all."""
        taken = {column.name: getattr(self, column.name)[elements[column.length]] for column in COLUMNS}
        return self.of_views(header, taken)

    def _laid_out(self) -> Layout:
        if self._layout is None:
            _set(self, "_layout", Layout(self))
        return self._layout  # type: ignore[return-value]


def _no_stops(batch: LogprobBatch) -> npt.NDArray[np.uint8]:
    """Return the column `stops` that says of no row which stop ended it."""
    return np.zeros(np.count_nonzero(batch.statuses == RowStatus.FINISHED_STOP), np.uint8)
