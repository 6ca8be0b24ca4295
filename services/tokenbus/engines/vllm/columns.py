"""Columns: a step's rows, and vLLM's arrays of logprobs, as the arrays that the worker publishes. Numpy alone.

vLLM has one line for each token: the sampled token's id and logprob, then the most probable ones, as many as the row of
the batch that asked for most. Lines of draft tokens that were rejected may be among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenbus.engines.engine import phase_of
from tokenbus.engines.vllm.token_scores import add_extras
from tokenbus.worker import StepArrays
from tokenbus_contracts import RowStatus, SpeculativeMethod, ValueKind

Lines = npt.NDArray[np.intp]
Ids = npt.NDArray[np.integer]
Values = npt.NDArray[np.floating]

_METHODS = {
    "ngram": SpeculativeMethod.NGRAM,
    "ngram_gpu": SpeculativeMethod.NGRAM,
    "suffix": SpeculativeMethod.SUFFIX,
    "mtp": SpeculativeMethod.MTP,
    "eagle": SpeculativeMethod.EAGLE,
    "eagle3": SpeculativeMethod.EAGLE,
}
UNSCORED = -1
"""The top-k of a row that wants no logprobs at all."""
_ABORTED = int(RowStatus.ABORTED)  # numpy takes longer for a member of an enumeration than for 256 elements
_BEHIND = np.iinfo(np.int64).max
_SIGN = np.int32(31)
_MAGNITUDE = np.int32(0x7FFFFFFF)


Logprobs = Any
"""vLLM's LogprobsLists or our TokenScores: of lines the ids and their values, the sampled token's before the most
probable ones', and the sampled token's rank; of rows the first line, or None where each has the line of its own index.
"""


@dataclass(slots=True, kw_only=True)
class Rows:
    """What a step made of its requests: columns as those of StepArrays, and the last two."""

    request_ids: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.uint32]
    statuses: npt.NDArray[np.uint8]
    token_counts: npt.NDArray[np.uint8]
    token_ids: npt.NDArray[np.uint32]
    draft_token_counts: npt.NDArray[np.uint8]
    stops: npt.NDArray[np.uint8]
    top_ks: npt.NDArray[np.int16]
    """How many alternatives each wants, or UNSCORED."""
    indices: npt.NDArray[np.intp]
    """Where each is in vLLM's arrays of the step; unused without tokens."""

    def __len__(self) -> int:
        return self.request_ids.size

    def __add__(self, other: "Rows") -> "Rows":
        if not len(self) or not len(other):
            return self if len(self) else other
        both = {each.name: (getattr(self, each.name), getattr(other, each.name)) for each in fields(self)}
        return Rows(**{name: np.concatenate(columns) for name, columns in both.items()})


NO_ROWS = Rows(
    request_ids=np.zeros(0, np.uint64),
    positions=np.zeros(0, np.uint32),
    statuses=np.zeros(0, np.uint8),
    token_counts=np.zeros(0, np.uint8),
    token_ids=np.zeros(0, np.uint32),
    draft_token_counts=np.zeros(0, np.uint8),
    stops=np.zeros(0, np.uint8),
    top_ks=np.zeros(0, np.int16),
    indices=np.zeros(0, np.intp),
)


def method_of(name: str | None) -> SpeculativeMethod:
    """Return the contract's name for vLLM's method of speculation; those that it does not know use a draft model."""
    if name is None:
        return SpeculativeMethod.NONE
    if name.endswith("_mtp"):
        return SpeculativeMethod.MTP
    return _METHODS.get(name, SpeculativeMethod.DRAFT_MODEL)


def step_arrays(rows: Rows, logprobs: Logprobs, *, method: SpeculativeMethod, value_kind: ValueKind) -> StepArrays:
    """Return a step's rows as arrays; a ValueError says that vLLM's arrays are not of these rows."""
    prefilling = int(np.count_nonzero((rows.positions == 0) & (rows.statuses != _ABORTED)))
    made = StepArrays(
        request_ids=rows.request_ids,
        positions=rows.positions,
        token_counts=rows.token_counts,
        token_ids=rows.token_ids,
        statuses=rows.statuses,
        stops=rows.stops if rows.stops.any() else None,
        draft_token_counts=rows.draft_token_counts,
        phase=phase_of(len(rows) - prefilling, prefilling),
        method=method,
        value_kind=value_kind,
    )
    # A row without tokens has no values, and must not ask for more alternatives than the others' arrays have.
    scored = (rows.top_ks != UNSCORED) & (rows.token_counts > 0)
    if scored.any():
        _score(made, rows, scored, logprobs)
    return made


def _score(made: StepArrays, rows: Rows, scored: npt.NDArray[np.bool_], logprobs: Logprobs) -> None:
    if logprobs is None:
        raise ValueError(f"vLLM gave no logprobs for {np.count_nonzero(scored)} requests that want them")
    counts, top_ks = rows.token_counts[scored], rows.top_ks[scored]
    lines = _lines_of(rows.indices[scored], counts, logprobs.cu_num_generated_tokens)
    width = int(top_ks.max())
    sampled = logprobs.logprob_token_ids[lines, 0]
    if not np.array_equal(sampled, rows.token_ids[np.repeat(scored, rows.token_counts)]):
        raise ValueError("vLLM's logprobs are of other tokens than it sampled")
    given = logprobs.logprobs.shape[1] - 1
    if width > given:
        raise ValueError(f"vLLM gave {given} alternatives to a request that wants {width}")
    made.scored = scored
    made.top_ks = (rows.top_ks * scored).astype(np.uint8)
    made.logprobs = logprobs.logprobs[lines, 0]
    made.ranks = logprobs.sampled_token_ranks[lines]
    if width:
        wanted = slice(1, 1 + width)  # before the lines, as a view: vLLM may have a column for each of its vocabulary
        ids, values = logprobs.logprob_token_ids[:, wanted][lines], logprobs.logprobs[:, wanted][lines]
        made.alternative_token_ids, made.alternative_logprobs = in_order(ids, values, np.repeat(top_ks, counts))
    if getattr(logprobs, "extras", None) is not None:
        add_extras(made, logprobs.extras[lines], scored, np.cumsum(counts, dtype=np.intp) - counts)


def _lines_of(indices: Lines, counts: npt.NDArray[np.uint8], starts: Sequence[int] | None) -> Lines:
    """Return the lines of the tokens that the rows keep; what was rejected comes after them in each row."""
    first = indices if starts is None else np.asarray(starts, np.intp)[indices]
    if counts.max() == 1:
        return first
    ends = np.cumsum(counts, dtype=np.intp)
    return np.repeat(first - ends + counts, counts) + np.arange(ends[-1])


def in_order(ids: Ids, values: Values, top_ks: npt.NDArray[np.integer]) -> tuple[Ids, Values]:
    """Return each line's first `top_ks` alternatives with the largest value first and, among ties, the lowest id.

    Ties are common in bfloat16, and torch.topk leaves their order open. What is behind a line's own top-k is left out
    of the order, and of no use: which of several ties is the last of k is for vLLM to say.
    """
    width = ids.shape[1]
    all_ids, all_values = ids.reshape(-1), values.reshape(-1)
    later, earlier = all_values[1:], all_values[:-1]
    rises = later > earlier
    is_wrong = rises | ((later == earlier) & (all_ids[1:] < all_ids[:-1]))
    rises[width - 1 :: width] = is_wrong[width - 1 :: width] = False  # between two lines
    if not is_wrong.any():
        return ids, values
    # One number for each alternative, by which it sorts: its value's bits, inverted, above its id's.
    bits = (values.astype(np.float32) + np.float32(0)).view(np.int32)  # the sum makes zeros of one sign
    bits ^= (bits >> _SIGN) & _MAGNITUDE
    places = ((~bits).astype(np.int64) << np.int64(32)) | ids
    if top_ks.min() < width:
        places[np.arange(width) >= top_ks[:, None]] = _BEHIND
    places.sort(axis=1)
    ids = (places & np.int64(0xFFFFFFFF)).astype(ids.dtype)
    if not rises.any():  # ties alone changed places
        return ids, values
    bits = ~(places >> np.int64(32)).astype(np.int32)
    bits ^= (bits >> _SIGN) & _MAGNITUDE
    return ids, bits.view(np.float32)
