"""Columns: converts a step's rows and vLLM's logprobs to the arrays of a step, in numpy.

vLLM has one line per token, with the ids and logprobs of the sampled token and then of the most probable tokens. Each
line has the largest number of alternatives that any row asked for. Rejected draft tokens may have lines, too.
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
from tokenbus_contracts.generated.request_pb2 import TokenScoring
from tokenbus_contracts.schema import bounds_in

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
"""Value of `top_ks` for a row without logprobs."""
_ABORTED = int(RowStatus.ABORTED)  # converted to an int, because numpy converts enum members slowly
_MASK_BOUND = bounds_in(TokenScoring.DESCRIPTOR.fields_by_name["mask_bound"].GetOptions()).max
_BEHIND = np.iinfo(np.int64).max
_SIGN = np.int32(31)
_MAGNITUDE = np.int32(0x7FFFFFFF)


Logprobs = Any
"""vLLM's LogprobsLists, or our TokenScores with the same fields and extra scores."""


@dataclass(slots=True, kw_only=True)
class Rows:
    """Rows of a step: the columns of StepArrays and two further columns."""

    request_ids: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.uint32]
    statuses: npt.NDArray[np.uint8]
    token_counts: npt.NDArray[np.uint8]
    token_ids: npt.NDArray[np.uint32]
    draft_token_counts: npt.NDArray[np.uint8]
    stops: npt.NDArray[np.uint8]
    top_ks: npt.NDArray[np.int16]
    """Requested number of alternatives, or UNSCORED."""
    indices: npt.NDArray[np.intp]
    """Index of the row in vLLM's arrays, which is unused for a row without tokens."""

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
    """Map vLLM's speculative method to the contract's. An unknown method counts as a draft model."""
    if name is None:
        return SpeculativeMethod.NONE
    if name.endswith("_mtp"):
        return SpeculativeMethod.MTP
    return _METHODS.get(name, SpeculativeMethod.DRAFT_MODEL)


def step_arrays(rows: Rows, logprobs: Logprobs, *, method: SpeculativeMethod, value_kind: ValueKind) -> StepArrays:
    """Convert rows to a step, or raise ValueError if vLLM's arrays do not match the rows."""
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
    # A row without tokens has no scores, and must not widen the arrays of alternatives.
    scored = (rows.top_ks != UNSCORED) & (rows.token_counts > 0)
    if scored.any():
        _score(made, rows, scored, logprobs)
    return made


def add_masks(made: StepArrays, rows: Rows, masks: Any) -> None:  # noqa: ANN401 - vLLM's SamplingMaskLists
    """Add each token's mask to a step, or raise ValueError if vLLM's masks do not match the rows."""
    given = rows.token_counts > 0
    if not given.any():
        return
    lines = _lines_of(rows.indices[given], rows.token_counts[given], masks.cu_num_generated_tokens)
    if lines.max() >= masks.offsets.size - 1:
        raise ValueError(f"vLLM gave {masks.offsets.size - 1} sampling masks, but token {lines.max()} wants one")
    starts = masks.offsets[lines]
    sizes = masks.offsets[lines + 1] - starts
    listed = np.where(sizes <= _MASK_BOUND, sizes, 0)
    ends = np.cumsum(listed)
    made.mask_bounds = np.where(given, _MASK_BOUND, 0)
    made.mask_sizes = sizes
    made.mask_token_ids = masks.token_ids[np.repeat(starts - ends + listed, listed) + np.arange(ends[-1])]


def _score(made: StepArrays, rows: Rows, scored: npt.NDArray[np.bool_], logprobs: Logprobs) -> None:
    if logprobs is None:
        raise ValueError(f"vLLM gave no logprobs for {np.count_nonzero(scored)} requests that want them")
    counts, top_ks = rows.token_counts[scored], rows.top_ks[scored]
    lines = _lines_of(rows.indices[scored], counts, logprobs.cu_num_generated_tokens)
    width = int(top_ks.max())
    sampled = logprobs.logprob_token_ids[lines, 0]
    if not np.array_equal(sampled, rows.token_ids[np.repeat(scored, rows.token_counts)]):
        raise ValueError("vLLM's logprobs do not belong to the sampled tokens")
    given = logprobs.logprobs.shape[1] - 1
    if width > given:
        raise ValueError(f"vLLM gave {given} alternatives to a request that wants {width}")
    made.scored = scored
    made.top_ks = (rows.top_ks * scored).astype(np.uint8)
    made.logprobs = logprobs.logprobs[lines, 0]
    made.ranks = logprobs.sampled_token_ranks[lines]
    if width:
        wanted = slice(1, 1 + width)  # cut columns first, because vLLM may have thousands of columns
        ids, values = logprobs.logprob_token_ids[:, wanted][lines], logprobs.logprobs[:, wanted][lines]
        made.alternative_token_ids, made.alternative_logprobs = in_order(ids, values, np.repeat(top_ks, counts))
    if getattr(logprobs, "extras", None) is not None:
        add_extras(made, logprobs.extras[lines], scored, np.cumsum(counts, dtype=np.intp) - counts)


def _lines_of(indices: Lines, counts: npt.NDArray[np.uint8], starts: Sequence[int] | None) -> Lines:
    """Return the lines of the accepted tokens. In each row, rejected tokens follow the accepted tokens."""
    first = indices if starts is None else np.asarray(starts, np.intp)[indices]
    if counts.max() == 1:
        return first
    ends = np.cumsum(counts, dtype=np.intp)
    return np.repeat(first - ends + counts, counts) + np.arange(ends[-1])


def in_order(ids: Ids, values: Values, top_ks: npt.NDArray[np.integer]) -> tuple[Ids, Values]:
    """Sort the first `top_ks` alternatives of each line by descending value, and equal values by id.

    Equal values are common in bfloat16, and torch.topk does not define the order of equal values. Alternatives after a
    line's top-k are unused. If values are equal at the end of the top-k, vLLM decides which alternatives to include.
    """
    width = ids.shape[1]
    all_ids, all_values = ids.reshape(-1), values.reshape(-1)
    later, earlier = all_values[1:], all_values[:-1]
    rises = later > earlier
    is_wrong = rises | ((later == earlier) & (all_ids[1:] < all_ids[:-1]))
    rises[width - 1 :: width] = is_wrong[width - 1 :: width] = False  # the two values are in different lines
    if not is_wrong.any():
        return ids, values
    # An alternative's sort key has the value's inverted bits in its upper half, and the id in its lower half.
    bits = (values.astype(np.float32) + np.float32(0)).view(np.int32)  # adding 0 turns -0 into +0
    bits ^= (bits >> _SIGN) & _MAGNITUDE
    places = ((~bits).astype(np.int64) << np.int64(32)) | ids
    if top_ks.min() < width:
        places[np.arange(width) >= top_ks[:, None]] = _BEHIND
    places.sort(axis=1)
    ids = (places & np.int64(0xFFFFFFFF)).astype(ids.dtype)
    if not rises.any():  # only equal values were reordered
        return ids, values
    bits = ~(places >> np.int64(32)).astype(np.int32)
    bits ^= (bits >> _SIGN) & _MAGNITUDE
    return ids, bits.view(np.float32)
