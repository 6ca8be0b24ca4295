"""TokenBuffer: the tokens of a stream as numpy columns with one value per token."""

from collections.abc import Sequence
from enum import IntEnum
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus.recordings.items import StreamItem
from tokenbus_contracts import BatchHeader, BatchKind, Extra, LogprobBatch, PromptScores, RowStatus, Scoring
from tokenbus_contracts.generated.enums import ValueKind
from tokenbus_contracts.schema import NO_COLUMNS

Array = npt.NDArray[Any]


class TokenKind(IntEnum):
    """Kind of a token."""

    TARGET = BatchKind.TARGET
    DRAFT = BatchKind.DRAFT
    PROMPT = 3
    """A scored token of the prompt."""


class Lists(NamedTuple):
    """A column with one list per token."""

    offsets: npt.NDArray[np.int64]
    """Offset of each list in `values`, followed by the number of values."""
    values: Array


Columns = dict[str, Any]
"""Columns of docs/recording.md by name, as arrays or `Lists`; unknown floats are NaN, and unknown integers are 0."""
_Head = tuple[int, ...]
"""Values from one item's header, in the order of the names in `_HEAD`."""
_HEAD = attrgetter("kind", "value_kind", "weight_version", "step", "sequence", "produced_at_ns")
_EMPTY = (0,) * 6, LogprobBatch(BatchHeader("", 1, 1, 1, 0))


class TokenBuffer:
    """A buffer for the tokens of items; `tokens` and `payload_bytes` tell its fill level."""

    def __init__(self) -> None:
        self._parts: list[tuple[_Head, LogprobBatch]] = []
        self.tokens = 0
        self.payload_bytes = 0

    def add(self, item: StreamItem) -> None:
        """Add the tokens of an item, if any; raises ContractError for an invalid item."""
        if item.batch is not None:
            part = _HEAD(item.batch.header), item.batch
        elif item.event is not None and item.event.HasField("prompt_scores"):
            part = _of_prompt(PromptScores.of(item.event.prompt_scores), item.sequence)
        else:
            return
        self._parts.append(part)
        (ids,) = part[1].arrays(["token_ids"])
        self.tokens += ids.size
        self.payload_bytes += len(item.payload)

    def take(self) -> Columns:
        """Remove and return all buffered tokens."""
        parts, self._parts = self._parts, []
        self.tokens = self.payload_bytes = 0
        return _joined(parts or [_EMPTY])


def _of_prompt(scores: PromptScores, sequence: int) -> tuple[_Head, LogprobBatch]:
    """Return prompt scores as a batch with one row per token."""
    count = scores.token_ids.size
    ones, zeros = np.ones(count, np.uint8), np.zeros(count, np.uint8)
    columns: dict[str, Array] = {
        "request_ids": np.full(count, scores.request_id, np.uint64),
        "positions": np.arange(scores.position, scores.end, dtype=np.uint32),
        "statuses": ones * RowStatus.PREFILLING,
        "token_counts": ones,
        "draft_token_counts": zeros,
        "proposal_counts": zeros,
        "scorings": ones * Scoring.FULL,
        "top_ks": np.full(count, scores.alternative_logprobs.shape[1], np.uint16),
        "token_ids": scores.token_ids,
        "logprobs": scores.logprobs,
        "ranks": scores.ranks,
        "alternative_token_ids": scores.alternative_token_ids.ravel(),
        "alternative_logprobs": scores.alternative_logprobs.ravel(),
    }
    head = TokenKind.PROMPT, ValueKind.RAW_LOGPROBS, 0, 0, sequence, 0
    return head, LogprobBatch.of_views(_EMPTY[1].header, NO_COLUMNS | columns)


def _joined(parts: Sequence[tuple[_Head, LogprobBatch]]) -> Columns:
    heads, batches = zip(*parts, strict=True)
    rows = LogprobBatch.concatenated(batches, _EMPTY[1].header)
    in_part = np.array([batch.token_ids.size for batch in batches])
    kind, value_kind, weight_version, step, sequence, produced_at_ns = (
        np.repeat(np.array(each, np.uint64), in_part) for each in zip(*heads, strict=True)
    )
    counts, size = rows.token_counts, rows.token_ids.size
    scoring = np.repeat(rows.scorings, counts)
    is_scored = scoring != Scoring.NONE
    ends = np.cumsum(counts, dtype=np.int64)
    top_ks = np.repeat(rows.top_ks, counts)
    proposals = np.zeros(size, np.int64)
    has_token = counts > 0
    proposals[ends[has_token] - 1] = rows.proposal_counts[has_token]
    return {
        "request_id": np.repeat(rows.request_ids, counts),
        "position": (np.repeat(rows.positions - (ends - counts), counts) + np.arange(size)).astype(np.uint32),
        "token_id": rows.token_ids,
        "logprob": _scattered(rows.logprobs, is_scored, np.nan),
        "rank": _scattered(rows.ranks, is_scored, 0),
        "alternative_token_ids": _lists_of(top_ks, rows.alternative_token_ids),
        "alternative_logprobs": _lists_of(top_ks, rows.alternative_logprobs),
        "kind": kind.astype(np.uint8),
        "status": np.repeat(rows.statuses, counts),
        "scoring": scoring,
        "value_kind": value_kind.astype(np.uint8),
        "draft_token_count": np.repeat(rows.draft_token_counts, counts),
        "proposal_token_ids": _lists_of(proposals, rows.proposal_token_ids[np.repeat(has_token, rows.proposal_counts)]),
        "weight_version": weight_version,
        "step": step,
        "sequence": sequence,
        "produced_at_ns": produced_at_ns,
        **_extras_of(rows),
    }


def _extras_of(rows: LogprobBatch) -> Columns:
    counts, nothing = rows.token_counts, np.zeros(rows.row_count, np.uint32)
    of_rows: tuple[Array, ...] = rows.extras, rows.given_counts, rows.mask_bounds
    extras, given_counts, mask_bounds = (column if column.size else nothing for column in of_rows)
    kinds, given, bounds = (np.repeat(each, counts) for each in (extras, given_counts, mask_bounds))
    values = _lists_of(given, rows.given_logprobs)
    ids_begin = np.repeat(_lists_of(given_counts, rows.given_token_ids).offsets[:-1], counts) - values.offsets[:-1]
    sizes = _scattered(rows.mask_sizes, bounds > 0, 0)
    return {
        "other_logprob": _scattered(rows.other_logprobs, kinds & Extra.OTHER_LOGPROB > 0, np.nan),
        "entropy": _scattered(rows.entropies, kinds & Extra.ENTROPY > 0, np.nan),
        "given_token_ids": values._replace(
            values=rows.given_token_ids[np.repeat(ids_begin, given) + np.arange(rows.given_logprobs.size)]
        ),
        "given_logprobs": values,
        "mask_size": sizes,
        "mask_token_ids": _lists_of(np.where(sizes <= bounds, sizes, 0), rows.mask_token_ids),
    }


def _scattered(values: Array, where: npt.NDArray[np.bool_], fill: float) -> Array:
    """Return a column with the values, in order, in the elements where `where` is set, and `fill` in all others."""
    if values.size == where.size:
        return values
    column = np.full(where.size, fill, values.dtype)
    column[where] = values
    return column


def _lists_of(counts: Array, values: Array) -> Lists:
    """Split values into consecutive lists of the given sizes."""
    offsets = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return Lists(offsets, values)
