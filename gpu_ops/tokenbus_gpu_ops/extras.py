"""Extras: the requested extra scores of each token, and the offsets of their results."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.extras import Extra
from tokenbus_contracts.generated.enums import Scoring
from tokenbus_contracts.schema import COLUMN
from tokenbus_gpu_ops.plan import Bytes, Index, Plan, flags, for_each, whole

Ids = npt.NDArray[np.uint32]

MAX_GIVEN = COLUMN["given_counts"].max
MAX_MASK_BOUND = COLUMN["mask_bounds"].max
NOWHERE = 0xFFFFFFFF
_FULL = np.uint8(Scoring.FULL)
_FIELDS = "value_at entropy_at given_ids_at given_at given_count mask_at mask_ids_at mask_bound"
ITEM = np.dtype([(name, "<u4") for name in _FIELDS.split()])
"""The extra scores of one row of logits and their offsets, as in the struct Wish of call.cuh."""


class Asked(NamedTuple):
    """The arguments for extra scores. The tuple is hashable if all requests have the same arguments."""

    other_logprobs: Any = None
    entropies: Any = False
    given_token_ids: Any = None
    given_counts: Any = None
    mask_bounds: Any = 0

    @property
    def is_alike(self) -> bool:
        """Whether all requests ask for the same scores and have no given ids."""
        if self.given_token_ids is not None or self.given_counts is not None:
            return False
        flags_alike = isinstance(self.other_logprobs, (bool, type(None))) and isinstance(self.entropies, bool)
        return flags_alike and type(self.mask_bounds) is int


class Sizes(NamedTuple):
    """The number of elements of each extra column."""

    other_logprobs: int = 0
    entropies: int = 0
    given_logprobs: int = 0
    mask_sizes: int = 0
    mask_slots: int = 0
    """The space for the ids of masks: the sum of the bounds of all tokens."""


class Shape(NamedTuple):
    """The shape of the extra scores of a call."""

    others: int = 0
    """The number of rows of `other_logits` that are read."""
    sizes: Sizes = Sizes()
    is_alike: bool = False
    """Whether all tokens ask for the same scores and have no given ids."""
    masks_are_others: bool = False
    """Whether masks are computed from `other_logits`."""
    most_mask: int = 0


NOTHING = Shape()


@dataclass(frozen=True, slots=True, eq=False)
class Extras:
    """The extra scores of a call, for each request and for each row."""

    flags: Bytes
    given_counts: Ids
    given_token_ids: Ids
    mask_bounds: Ids
    shape: Shape
    others: Index
    """The index of the scored token for each row of `other_logits`."""
    items: npt.NDArray[Any]
    """An ITEM for each scored token, followed by an ITEM for each row of `other_logits` that is read."""


def extras(plan: Plan, vocabulary: int, asked: Asked, *, has_other: bool, is_processed: bool) -> Extras | None:
    """Return the extra scores of the scored tokens, or None if no extra scores were requested.

    Masks are computed from `other_logits` if `logits` are raw and `other_logits` exist, and from `logits` otherwise.
    """
    if asked.other_logprobs is not None and not has_other and np.any(asked.other_logprobs):
        raise ContractError("other_logprobs", "other_logits with them", "none", rule=Rule.REQUIRED)
    wanted = has_other if asked.other_logprobs is None else asked.other_logprobs
    if asked.is_alike and not (wanted or asked.entropies or asked.mask_bounds):
        return None
    requests, scored = plan.requests, plan.scorings == _FULL
    other = _flags("other_logprobs", wanted, requests)
    entropies = _flags("entropies", asked.entropies, requests)
    bounds = for_each("mask_bounds", asked.mask_bounds, requests, MAX_MASK_BOUND)
    counts, ids = _given(asked, requests, vocabulary)
    if not scored.all():
        other, entropies, bounds = other & scored, entropies & scored, np.where(scored, bounds, 0)
        ids, counts = ids[scored.repeat(counts)], np.where(scored, counts, 0)
    has_entropies, has_masks, has_given = (bool(each.any()) for each in (entropies, bounds, counts))
    if not (has_entropies or has_masks or has_given or other.any()):
        return None
    masks_are_others = has_other and not is_processed
    of = np.arange(requests).repeat(plan.token_counts)[plan.scored_tokens]
    others = np.flatnonzero((other | (bounds > 0) if masks_are_others else other)[of])
    items = np.zeros(plan.scored + others.size, ITEM)
    items["entropy_at"] = NOWHERE
    own, second = items[: plan.scored], items[plan.scored :]
    sizes = [0] * len(Sizes._fields)
    if others.size:
        sizes[0] = _place(second["value_at"], other[of[others]])
    if has_entropies:
        sizes[1] = _place(own["entropy_at"], entropies[of])
    if has_given:
        own["given_count"] = counts[of]
        own["given_ids_at"] = (np.add.accumulate(counts) - counts)[of]
        sizes[2] = _place(own["given_at"], counts[of])
    if has_masks:
        masks, bound = (second, bounds[of[others]]) if masks_are_others else (own, bounds[of])
        masks["mask_bound"] = bound
        sizes[3:] = _place(masks["mask_at"], bound > 0), _place(masks["mask_ids_at"], bound)
    is_alike = plan.top_k is not None and asked.is_alike
    shape = Shape(others.size, Sizes(*sizes), is_alike, masks_are_others, int(bounds.max()))
    bits = other.view(np.uint8) * np.uint8(Extra.OTHER_LOGPROB) | entropies.view(np.uint8) * np.uint8(Extra.ENTROPY)
    made = Extras(bits, counts.astype(np.uint32), ids, bounds.astype(np.uint32), shape, others, items)
    for column in (made.flags, made.given_counts, made.given_token_ids, made.mask_bounds):
        column.flags.writeable = False  # later calls may share the cached array
    return made


def _place(into: npt.NDArray[Any], each: npt.NDArray[Any]) -> int:
    """Write the offset of each row's elements, or NOWHERE for a row without elements, and return the total."""
    ends = np.add.accumulate(each, dtype=np.intp)
    into[:] = ends - each
    into[each == 0] = NOWHERE
    return int(ends[-1]) if ends.size else 0


def _flags(name: str, values: Any, requests: int) -> npt.NDArray[np.bool_]:  # noqa: ANN401
    return np.full(requests, values) if isinstance(values, bool) else flags(name, values, requests)


def _given(asked: Asked, requests: int, vocabulary: int) -> tuple[Index, Ids]:
    """Return the number of given ids of each request, and all ids. Without counts, all requests use the same ids."""
    if asked.given_token_ids is None:
        if asked.given_counts is not None:
            raise ContractError("given_counts", "given_token_ids with them", "none", rule=Rule.REQUIRED)
        return np.zeros(requests, np.intp), np.zeros(0, np.uint32)
    ids = whole("given_token_ids", asked.given_token_ids, vocabulary - 1).astype(np.uint32)
    if asked.given_counts is None:
        if ids.size > MAX_GIVEN:
            raise ContractError("given_token_ids", MAX_GIVEN, int(ids.size), rule=Rule.ITEMS)
        return np.full(requests, ids.size), np.tile(ids, requests)
    counts = for_each("given_counts", asked.given_counts, requests, MAX_GIVEN)
    if ids.size != counts.sum():
        limit = f"{counts.sum()} elements, the sum of given_counts"
        raise ContractError("given_token_ids", limit, int(ids.size), rule=Rule.LENGTH)
    return counts, ids
