"""Columns: a step's rows, and vLLM's arrays of logprobs, as the arrays that the worker publishes. Numpy alone.

vLLM has one line for each token: the sampled token's id and logprob, then the most probable ones, as many as the row of
the batch that asked for most. Lines of draft tokens that were rejected may be among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import RowStatus, SpeculativeMethod, ValueKind
from tokenbus_engines.engine import phase_of
from tokenbus_services.worker import StepArrays

Lines = npt.NDArray[np.intp]
Ids = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]

_METHODS = {
    "ngram": SpeculativeMethod.NGRAM,
    "ngram_gpu": SpeculativeMethod.NGRAM,
    "suffix": SpeculativeMethod.SUFFIX,
    "mtp": SpeculativeMethod.MTP,
    "eagle": SpeculativeMethod.EAGLE,
    "eagle3": SpeculativeMethod.EAGLE,
}
_BEHIND = np.iinfo(np.int64).max
_SIGN = np.int32(31)
_MAGNITUDE = np.int32(0x7FFFFFFF)


Logprobs = Any
"""vLLM's LogprobsLists: of lines the ids and their values, the sampled token's before the most probable ones', and the
sampled token's rank; of rows the first line, or None where each row has the line of its own index."""


@dataclass(slots=True, kw_only=True)
class Row:
    """What a step made of one request."""

    key: int
    position: int
    """The place of its first token in its output."""
    status: RowStatus
    token_ids: Sequence[int] = ()
    """The tokens that are kept."""
    top_k: int | None = None
    """How many alternatives it wants; None: no logprobs at all."""
    drafts: int = 0
    """How many draft tokens were verified for it."""
    index: int = 0
    """Its index in the arrays of the step; unused without tokens."""
    stop: int = 0
    """Which of its request's own stops ended it, as `StepArrays.stops` has it."""


def method_of(name: str | None) -> SpeculativeMethod:
    """Return the contract's name for vLLM's method of speculation; those that it does not know use a draft model."""
    if name is None:
        return SpeculativeMethod.NONE
    if name.endswith("_mtp"):
        return SpeculativeMethod.MTP
    return _METHODS.get(name, SpeculativeMethod.DRAFT_MODEL)


def step_arrays(
    rows: Sequence[Row], logprobs: Logprobs, *, method: SpeculativeMethod, value_kind: ValueKind
) -> StepArrays:
    """Return a step's rows as arrays; a ValueError says that vLLM's arrays are not of these rows."""
    stops = [row.stop for row in rows]
    prefilling = sum(not row.position and row.status is not RowStatus.ABORTED for row in rows)
    made = StepArrays(
        request_keys=np.array([row.key for row in rows], np.uint64),
        positions=np.array([row.position for row in rows], np.uint32),
        token_counts=np.array([len(row.token_ids) for row in rows], np.uint8),
        token_ids=np.array(list(chain.from_iterable(row.token_ids for row in rows)), np.uint32),
        statuses=np.array([row.status for row in rows], np.uint8),
        stops=np.array(stops, np.uint8) if any(stops) else None,
        draft_token_counts=np.array([row.drafts for row in rows], np.uint8),
        phase=phase_of(len(rows) - prefilling, prefilling),
        method=method,
        value_kind=value_kind,
    )
    scored = [row for row in rows if row.top_k is not None and row.token_ids]
    if scored:
        _score(made, rows, scored, logprobs)
    return made


def _score(made: StepArrays, rows: Sequence[Row], scored: Sequence[Row], logprobs: Logprobs) -> None:
    """Add the logprobs, ranks and alternatives of the scored rows."""
    if logprobs is None:
        raise ValueError(f"vLLM gave no logprobs for {len(scored)} requests that want them")
    lines = _lines_of(scored, logprobs)
    sampled = logprobs.logprob_token_ids[lines, 0]
    if not np.array_equal(sampled, list(chain.from_iterable(row.token_ids for row in scored))):
        raise ValueError("vLLM's logprobs are of other tokens than it sampled")
    top_ks = [row.top_k or 0 for row in scored]
    width = max(top_ks)
    given = logprobs.logprobs.shape[1] - 1
    if width > given:
        raise ValueError(f"vLLM gave {given} alternatives to a request that wants {width}")
    # A row without tokens has no values, and must not ask for more alternatives than the others' arrays have.
    wanted = [row.top_k if row.token_ids else None for row in rows]
    made.scored = np.array([top_k is not None for top_k in wanted], np.bool_)
    made.top_ks = np.array([top_k or 0 for top_k in wanted], np.uint8)
    made.logprobs = logprobs.logprobs[lines, 0]
    made.ranks = logprobs.sampled_token_ranks[lines]
    made.alternative_token_ids, made.alternative_logprobs = in_order(
        logprobs.logprob_token_ids[lines, 1 : 1 + width],
        logprobs.logprobs[lines, 1 : 1 + width],
        np.repeat(top_ks, [len(row.token_ids) for row in scored]),
    )


def _lines_of(scored: Sequence[Row], logprobs: Logprobs) -> Lines:
    """Return the lines of the tokens that the rows keep; what was rejected comes after them in each row."""
    starts = logprobs.cu_num_generated_tokens
    lines = chain.from_iterable(
        range(start := row.index if starts is None else starts[row.index], start + len(row.token_ids)) for row in scored
    )
    return np.fromiter(lines, np.intp)


def in_order(
    token_ids: npt.NDArray[np.integer], values: npt.NDArray[np.floating], top_ks: npt.NDArray[np.integer]
) -> tuple[Ids, Values]:
    """Return each line's first `top_ks` alternatives with the largest value first and, among ties, the lowest id.

    Ties are common in bfloat16, and torch.topk leaves their order open. What is behind a line's own top-k is left out
    of the order, and of no use: which of several ties is the last of k is for vLLM to say.
    """
    # One number for each alternative, by which it sorts: its value's bits, inverted, above its id's.
    bits = (values.astype(np.float32) + np.float32(0)).view(np.int32)  # the sum makes zeros of one sign
    bits ^= (bits >> _SIGN) & _MAGNITUDE
    places = ((~bits).astype(np.int64) << np.int64(32)) | token_ids
    if top_ks.size and top_ks.min() < places.shape[1]:
        places[np.arange(places.shape[1]) >= top_ks[:, None]] = _BEHIND
    if not (places[:, 1:] < places[:, :-1]).any():
        return token_ids.astype(np.int64), values.astype(np.float32)
    places.sort(axis=1)
    bits = ~(places >> np.int64(32)).astype(np.int32)
    bits ^= (bits >> _SIGN) & _MAGNITUDE
    return places & np.int64(0xFFFFFFFF), bits.view(np.float32)
