"""RenderedStep: a step's columns as lists and JSON, made once for all requests that have a row in it."""

from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import orjson

from tokenbus_contracts import LogprobBatch, RowStatus, Scoring
from tokenbus_services.gateway.native import Columns, Fragments
from tokenbus_services.gateway.vocabulary import Vocabulary

_BLOCK_ROWS = 32
_Blocks = dict[int, list[tuple[bytes, ...]] | None]
_NUMPY = orjson.OPT_SERIALIZE_NUMPY


class RenderedStep:
    """One batch. Columns are lists, from which a row takes a slice, so that few objects are made for each token."""

    def __init__(self, batch: LogprobBatch, vocabulary: Vocabulary, draft: LogprobBatch | None = None) -> None:
        self.batch = batch
        self.vocabulary = vocabulary
        self.draft = None if draft is None else RenderedStep(draft, vocabulary)
        self.produced_at_ns = batch.header.produced_at_ns
        self.statuses: list[int] = batch.statuses.tolist()
        stopped = np.flatnonzero(batch.statuses == RowStatus.FINISHED_STOP) if batch.stops.size else batch.stops
        self.stops: dict[int, int] = dict(zip(stopped.tolist(), batch.stops.tolist(), strict=True))
        """By row number, which of its request's own stops ended it, as the column has it."""
        counts = batch.token_counts.astype(np.intp)
        scored = np.where(batch.scorings != Scoring.NONE, counts, 0)
        self.counts: list[int] = counts.tolist()
        self.begins = _begins(self.counts)
        """Each row's first token."""
        self.scored: list[int] = scored.tolist()
        """How many of a row's tokens have logprobs: all or none."""
        self.scored_begins = _begins(self.scored)
        """Each row's first logprob and rank."""
        self.top_ks: list[int] = batch.top_ks.tolist()
        self.alternative_begins = _begins((scored * batch.top_ks).tolist())
        """Each row's first alternative."""
        self._lists: _Blocks = {}
        self._contents: _Blocks = {}

    @cached_property
    def places(self) -> dict[int, int]:
        """Row numbers by request id."""
        return {key: place for place, key in enumerate(self.batch.request_keys.tolist())}

    def drafted(self, place: int) -> "tuple[RenderedStep, int] | None":
        """Return the step and the place of a row's draft proposals, or None without proposals."""
        if self.draft is None:
            return None
        found = self.draft.places.get(int(self.batch.request_keys[place]))
        return None if found is None or not self.draft.counts[found] else (self.draft, found)

    @cached_property
    def ids(self) -> list[int]:
        """All token ids."""
        return self.batch.token_ids.tolist()  # type: ignore[no-any-return]

    @cached_property
    def texts(self) -> list[bytes]:
        """All tokens as JSON strings, empty where they have no text."""
        return list(map(self.vocabulary.texts.__getitem__, self.ids))

    @cached_property
    def said(self) -> list[bytes]:
        """Each row's text as a JSON string, where it is the same whatever came before it; else nothing."""
        rendered = self.vocabulary.text_fragments.render(self._columns, 0, len(self.counts))
        return [b""] * len(self.counts) if rendered is None else [text for (text,) in rendered]

    @cached_property
    def character_begins(self) -> list[int]:
        """How many characters begin before each token, and in total."""
        return _begins(list(map(self.vocabulary.characters.__getitem__, self.ids)))

    @cached_property
    def special_character_begins(self) -> list[int]:
        """The same in a text that has special tokens' names, too."""
        return _begins(list(map(self.vocabulary.special_characters.__getitem__, self.ids)))

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks of scored tokens."""
        return self.batch.ranks.tolist()  # type: ignore[no-any-return]

    @cached_property
    def logprobs(self) -> list[bytes]:
        """The logprobs of scored tokens as JSON: the shortest decimal that is the same float32."""
        return _written(self.batch.logprobs)

    @cached_property
    def pairs(self) -> "_Written":
        """Alternatives as members of objects: each's key, after a comma, and its logprob."""
        return _Written(self, self.vocabulary.keys)

    @cached_property
    def entries(self) -> "_Written":
        """Alternatives as objects of chats: each's beginning, after another's end, and its logprob."""
        return _Written(self, self.vocabulary.entries)

    def lists(self, place: int) -> tuple[bytes, ...] | None:
        """Return the JSON of all of a row's tokens, their logprobs and their alternatives, each with commas between.

        None: they are for Python to write.
        """
        return self._rendered(place, self.vocabulary.key_fragments, self._lists)

    def contents(self, place: int) -> bytes | None:
        """Return all of a row's tokens as objects of chats with commas between; None: as above."""
        found = self._rendered(place, self.vocabulary.entry_fragments, self._contents)
        return None if found is None else found[0]

    def _rendered(self, place: int, fragments: Fragments, blocks: _Blocks) -> tuple[bytes, ...] | None:
        """Return a row of its block: blocks, so that the first row need not wait for the last."""
        block, row = divmod(place, _BLOCK_ROWS)
        if block not in blocks:
            begin = block * _BLOCK_ROWS
            blocks[block] = fragments.render(self._columns, begin, min(begin + _BLOCK_ROWS, len(self.counts)))
        rendered = blocks[block]
        return None if rendered is None else rendered[row]

    @cached_property
    def _columns(self) -> Columns:
        return Columns(self.batch, self.scored_begins[-1], self.begins, self.alternative_begins)

    def data(self, place: int) -> bytes:
        """Return the bytes of a row's text."""
        return b"".join(map(self.vocabulary.pieces.__getitem__, self.row_ids(place)))

    def row_ids(self, place: int) -> list[int]:
        """Return a row's token ids."""
        begin = self.begins[place]
        return self.ids[begin : begin + self.counts[place]]


class _Written:
    """Alternatives as JSON, two pieces each, encoded in blocks of rows: the first row need not wait for the last."""

    def __init__(self, view: RenderedStep, table: dict[int, bytes]) -> None:
        self._view = view
        self._table = table
        self._blocks: dict[int, list[bytes]] = {}

    def of(self, place: int) -> list[bytes]:
        """Return those of a row."""
        begins = self._view.alternative_begins
        block = place // _BLOCK_ROWS
        written = self._blocks.get(block)
        if written is None:
            written = self._blocks[block] = self._write(block)
        before = begins[block * _BLOCK_ROWS]
        return written[2 * (begins[place] - before) : 2 * (begins[place + 1] - before)]

    def _write(self, block: int) -> list[bytes]:
        begins, batch = self._view.alternative_begins, self._view.batch
        begin, end = begins[block * _BLOCK_ROWS], begins[min((block + 1) * _BLOCK_ROWS, len(begins) - 1)]
        written = [b""] * (2 * (end - begin))
        written[0::2] = map(self._table.__getitem__, batch.alternative_token_ids[begin:end].tolist())
        written[1::2] = _written(batch.alternative_logprobs[begin:end])
        return written


def _begins(counts: list[int]) -> list[int]:
    return [0, *accumulate(counts)]


def _written(values: npt.NDArray[np.float32]) -> list[bytes]:
    if not values.size:
        return []
    return orjson.dumps(np.ascontiguousarray(values), option=_NUMPY)[1:-1].split(b",")
