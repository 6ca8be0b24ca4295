"""RenderedStep: the columns of a step as lists and JSON, computed on first use and shared by all requests."""

from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import orjson

from tokenbus.client.weight_spans import WeightSpan, WeightSpans
from tokenbus.gateway.native import Begins, Columns, Fragments
from tokenbus.gateway.vocabulary import Vocabulary
from tokenbus_contracts import LogprobBatch, RowStatus, Scoring

_BLOCK_ROWS = 32
"""Number of rows that are rendered together. The number is small, so that the first row need not wait long."""
_BATCH_BYTES = 2000
_LISTED_BYTES = 200
VALUE_BYTES = 4
_NUMPY = orjson.OPT_SERIALIZE_NUMPY


def _listed(column: str) -> "cached_property[list[int]]":
    return cached_property(lambda step: getattr(step.batch, column).tolist())


def _listed_begins(place: int) -> "cached_property[list[int]]":
    return cached_property(lambda step: step.all_begins[place].tolist())


class RenderedStep:
    """A batch whose columns are lists. A row uses slices of these lists, so that a token needs few objects."""

    statuses = _listed("statuses")
    counts = _listed("token_counts")
    top_ks = _listed("top_ks")
    ids = _listed("token_ids")
    ranks = _listed("ranks")
    begins = _listed_begins(0)
    scored_begins = _listed_begins(1)
    alternative_begins = _listed_begins(2)

    def __init__(
        self,
        batch: LogprobBatch,
        vocabulary: Vocabulary,
        draft: LogprobBatch | None = None,
        weights: WeightSpans | None = None,
    ) -> None:
        self.batch = batch
        self._weights = weights
        self.vocabulary = vocabulary
        self.draft = None if draft is None else RenderedStep(draft, vocabulary)
        self.produced_at_ns = batch.header.produced_at_ns
        self.waiting: dict[WaitingRow, None] = {}
        self._rendered: dict[tuple[int, Fragments], list[tuple[bytes, ...]] | None] = {}
        self._alternatives: dict[tuple[int, int], list[bytes]] = {}

    def compacted(self) -> "RenderedStep":
        """Move the waiting rows to a new step without other rows, and return the new step."""
        waiting = list(self.waiting)
        batch, draft = self.batch.select([each.row for each in waiting]), None
        if self.draft is not None:
            draft = self.draft.batch
            draft = draft.select(np.flatnonzero(np.isin(draft.request_ids, batch.request_ids)))
        step = RenderedStep(batch, self.vocabulary, draft, self._weights)
        for row, each in enumerate(waiting):
            each.step, each.row = step, row
        step.waiting, self.waiting = self.waiting, {}
        return step

    @cached_property
    def size(self) -> int:
        """Number of bytes of memory that the step takes while rows wait."""
        own = size_of(self.batch) + _LISTED_BYTES * self.batch.token_ids.size
        return own + (0 if self.draft is None else self.draft.size)

    @cached_property
    def stops(self) -> dict[int, int]:
        """Maps the index of each row that ended by a stop to the row's value in the column `stops`."""
        batch = self.batch
        stopped = np.flatnonzero(batch.statuses == RowStatus.FINISHED_STOP) if batch.stops.size else batch.stops
        return dict(zip(stopped.tolist(), batch.stops.tolist(), strict=True))

    @cached_property
    def scored(self) -> list[int]:
        """Number of tokens with logprobs in each row: zero, or all tokens of the row."""
        return np.diff(self.all_begins[1]).tolist()  # type: ignore[no-any-return]

    @cached_property
    def all_begins(self) -> Begins:
        """Arrays of offsets for tokens, logprobs and alternatives: the start of each row, then the total."""
        batch = self.batch
        begins = np.zeros((3, batch.row_count + 1), np.int64)
        scored = batch.token_counts * (batch.scorings != Scoring.NONE)
        np.add.accumulate(batch.token_counts, out=begins[0, 1:])
        np.add.accumulate(scored, out=begins[1, 1:])
        np.add.accumulate(np.multiply(scored, batch.top_ks, dtype=np.int64), out=begins[2, 1:])
        return begins

    @cached_property
    def rows(self) -> dict[int, int]:
        return {request_id: row for row, request_id in enumerate(self.batch.request_ids.tolist())}

    def drafted(self, row: int) -> "tuple[RenderedStep, int] | None":
        if self.draft is None:
            return None
        found = self.draft.rows.get(int(self.batch.request_ids[row]))
        return None if found is None or not self.draft.counts[found] else (self.draft, found)

    def weight_spans(self, row: int) -> tuple[WeightSpan, ...]:
        if self._weights is None:
            return ()
        end = int(self.batch.positions[row]) + self.counts[row]
        return self._weights.of(int(self.batch.request_ids[row]), end)

    @cached_property
    def character_begins(self) -> list[int]:
        """Number of characters that begin before each token. The last element is the total number."""
        return [0, *accumulate(map(self.vocabulary.characters.__getitem__, self.ids))]

    @cached_property
    def special_character_begins(self) -> list[int]:
        return [0, *accumulate(map(self.vocabulary.special_characters.__getitem__, self.ids))]

    @cached_property
    def logprobs(self) -> list[bytes]:
        return numbers_as_json(self.batch.logprobs)

    def alternatives(self, row: int, table: Mapping[int, bytes]) -> list[bytes]:
        """Return two pieces of JSON for each alternative of a row: the token's value in `table`, and the logprob."""
        begins, block = self.alternative_begins, row // _BLOCK_ROWS * _BLOCK_ROWS
        first = begins[block]
        written = self._alternatives.get((block, id(table)))
        if written is None:
            if self.waiting:  # rows may wait long, so render only this row
                return self._pairs(begins[row], begins[row + 1], table)
            last = begins[min(block + _BLOCK_ROWS, len(self.counts))]
            written = self._alternatives[block, id(table)] = self._pairs(first, last, table)
        return written[2 * (begins[row] - first) : 2 * (begins[row + 1] - first)]

    def _pairs(self, first: int, last: int, table: Mapping[int, bytes]) -> list[bytes]:
        written = [b""] * (2 * (last - first))
        written[0::2] = map(table.__getitem__, self.batch.alternative_token_ids[first:last].tolist())
        written[1::2] = numbers_as_json(self.batch.alternative_logprobs[first:last])
        return written

    def rendered(self, row: int, fragments: Fragments) -> tuple[bytes, ...] | None:
        """Return the logprobs of a row as JSON lists without brackets, made from a vocabulary's fragments.

        Completions have three lists: tokens, logprobs and alternatives. Chats have one list of objects. If the compiled
        renderer cannot write the row, return None.
        """
        block, row_of_block = divmod(row, _BLOCK_ROWS)
        if (block, fragments) not in self._rendered:
            if self.waiting:
                alone = fragments.render(self.columns, row, row + 1)
                return None if alone is None else alone[0]
            begin = block * _BLOCK_ROWS
            end = min(begin + _BLOCK_ROWS, len(self.counts))
            self._rendered[block, fragments] = fragments.render(self.columns, begin, end)
        rendered = self._rendered[block, fragments]
        return None if rendered is None else rendered[row_of_block]

    @cached_property
    def columns(self) -> Columns:
        return Columns(self.batch, self.all_begins)

    @cached_property
    def column_bytes(self) -> list[memoryview]:
        names = ("token_ids", "logprobs", "ranks", "alternative_token_ids", "alternative_logprobs")
        return [np.ascontiguousarray(getattr(self.batch, name)).view(np.uint8).data for name in names]

    def data(self, row: int) -> bytes:
        return b"".join(map(self.vocabulary.pieces.__getitem__, self.row_ids(row)))

    def row_ids(self, row: int) -> list[int]:
        begin = self.begins[row]
        return self.ids[begin : begin + self.counts[row]]


class WaitingRow:
    """A row that waits to be delivered: a step, and the index of the row in the step."""

    __slots__ = ("row", "step")

    def __init__(self, step: RenderedStep, row: int) -> None:
        self.step, self.row = step, row


def size_of(batch: LogprobBatch) -> int:
    return _BATCH_BYTES + batch.nbytes


def numbers_as_json(values: npt.NDArray[np.float32]) -> list[bytes]:
    """Return numbers as JSON, each as the shortest decimal that is read as the same float32."""
    if not values.size:
        return []
    return orjson.dumps(np.ascontiguousarray(values), option=_NUMPY)[1:-1].split(b",")
