"""Conversion of a message to StepArrays.

A score that breaks the contract is corrected if the intended value is clear, and left out otherwise.
"""

import numpy as np

from tokenbus.engines.fastdeploy.environment import Options
from tokenbus.engines.fastdeploy.message import (
    COLUMNS,
    DRAFT,
    PREEMPTED,
    UNRECOVERABLE,
    Flags,
    Floats,
    Integers,
    Ints,
    Message,
)
from tokenbus.worker.step import StepArrays
from tokenbus_contracts import BatchKind, RowStatus, SpeculativeMethod, StepPhase

LOWEST = np.float32(-9999)
"""Lowest logprob, which stands for minus infinity."""
_ROUNDING = np.float32(1e-3)
"""Largest logprob above 0 that counts as a rounding error."""
_ULPS = np.float32(1e-5)
"""Largest relative difference between two logprobs of one token that counts as a rounding error."""
_HIGHEST = 2**31 - 1


def arrays_of(message: Message, options: Options) -> tuple[StepArrays, int]:
    """Return a message's arrays without request ids and positions, and the number of corrected scores."""
    ids, given = message.tokens[:, 0], message.token_counts
    counts, kept = _tokens(message, ids, given)
    statuses = np.where(counts > 0, np.uint8(RowStatus.ACTIVE), np.uint8(RowStatus.IDLE))
    statuses[counts == PREEMPTED] = RowStatus.PREEMPTED
    statuses[counts == UNRECOVERABLE] = RowStatus.UNRECOVERABLE
    arrays = StepArrays(
        request_ids=(),
        positions=(),
        statuses=statuses,
        token_counts=np.maximum(counts, 0),
        token_ids=ids[kept],
        kind=BatchKind.DRAFT if message.flag == DRAFT else BatchKind.TARGET,
        method=SpeculativeMethod.NONE if message.lengths is None else options.method,
        value_kind=options.value_kind,
    )
    if message.is_first:
        is_own = np.zeros(ids.size, np.bool_)
        is_own[(np.cumsum(given) - given)[given > 0]] = True
        if arrays.kind is BatchKind.TARGET:
            arrays.phase = StepPhase.PREFILL
            arrays.proposal_counts = np.maximum(counts - 1, 0)
            arrays.proposal_token_ids = ids[kept & ~is_own]
        kept &= is_own
        arrays.token_counts = np.minimum(arrays.token_counts, 1)
        arrays.token_ids = ids[kept]
    if not message.kind.is_scored:
        return arrays, 0
    of_bus = slice(0, COLUMNS)  # since #7861, a message may have more columns than the contract allows
    tokens, scores = message.tokens[kept][:, of_bus], message.scores[kept][:, of_bus]
    return arrays, _add_scores(arrays, tokens, scores, message.ranks[kept])


def _tokens(message: Message, ids: Ints, given: Ints) -> tuple[Integers, Flags]:
    """Return the slots' counts and a mask of the kept tokens. A slot's tokens end at its first invalid id."""
    if message.kind.is_single:
        magic = np.where((ids == PREEMPTED) | (ids == UNRECOVERABLE), ids, 0)
        return np.where(ids >= 0, 1, magic).astype(np.int64), ids >= 0
    counts = message.counts.astype(np.int64)
    counts[(counts < 0) & (counts != PREEMPTED) & (counts != UNRECOVERABLE)] = 0
    slots = np.repeat(np.arange(given.size), given)
    places = np.arange(ids.size) - np.repeat(np.cumsum(given) - given, given)
    wrong = np.flatnonzero(ids < 0)
    if wrong.size:
        np.minimum.at(counts, slots[wrong], places[wrong])
    return counts, places < counts[slots]


def _add_scores(arrays: StepArrays, table: Ints, values: Floats, ranks: Ints) -> int:
    """Add the corrected scores of a step's tokens to `arrays`, and return the number of corrected values."""
    counts = arrays.token_counts
    ids, width = table[:, 1:], table.shape[1] - 1
    given = values
    with np.errstate(invalid="ignore"):
        is_sound = np.isfinite(values) | np.isneginf(values)
        is_sound &= values <= _ROUNDING
        values = np.where(is_sound, np.clip(values, LOWEST, 0), 0).astype(np.float32)
        mended = int(np.count_nonzero(is_sound & (values != given)))
    # Padding marks the end of the alternatives.
    is_there = np.logical_and.accumulate(ids >= 0, axis=1)
    top_ks = _least_of_slots(is_there.sum(axis=1), counts, width)
    is_wanted = np.arange(width) < np.repeat(top_ks, counts)[:, None]
    is_good = is_sound[:, 0] & (is_sound[:, 1:] | ~is_wanted).all(axis=1)
    # Alternatives beyond the slot's top-k are sorted to the end.
    others = np.where(is_wanted, values[:, 1:], -np.inf)
    order = np.lexsort((ids, -others), axis=1)
    if width and (order != np.arange(width)).any():
        ids, others = np.take_along_axis(ids, order, axis=1), np.take_along_axis(others, order, axis=1)
    own, places = values[:, 0].copy(), ranks.astype(np.int64)
    if width:
        mended += _agree(table[:, 0], own, places, ids, others, is_good)
    is_good &= (places >= 1) & (places <= _HIGHEST)
    arrays.scored = _least_of_slots(is_good.astype(np.int64), counts, 1).astype(np.bool_)
    arrays.logprobs, arrays.ranks, arrays.top_ks = own, places, top_ks
    arrays.alternative_token_ids, arrays.alternative_logprobs = ids, np.maximum(others, LOWEST)
    return mended


def _agree(  # noqa: PLR0913, PLR0917 - the columns of tokens, each of which may be wrong
    sampled: Ints, own: Floats, places: Integers, ids: Ints, others: Floats, is_good: Flags
) -> int:
    """Correct in place the scores that contradict a token's alternatives, and return the number of changed values."""
    every = np.arange(sampled.size)
    has_any = np.isfinite(others[:, 0])
    before = own.copy(), places.copy()
    same = (ids == sampled[:, None]) & np.isfinite(others)
    known, at = same.any(axis=1), same.argmax(axis=1)
    # A token's own logprob may be wrong. If the token is among its alternatives, the alternative's logprob replaces it.
    # FastDeploy keeps the old logprob if it replaces the sampled token by the end token at the maximum length.
    own[known] = others[every, at][known]
    last = np.where(np.isfinite(others), others, np.inf).min(axis=1, initial=np.inf)
    reach = np.isfinite(others).sum(axis=1)
    near = _ULPS * np.maximum(1, np.abs(own))
    within = (places >= 1) & (places <= reach)
    at_rank = others[every, np.clip(places - 1, 0, others.shape[1] - 1)]
    wrong = np.where(within, at_rank != own, (last < own) | (places < 1)) & has_any
    places[wrong & known] = at[wrong & known] + 1
    # If rounding alone made a token's rank wrong, and the token is not among its alternatives, correct its logprob.
    close = wrong & ~known
    to = np.where(within, at_rank, last)
    with np.errstate(invalid="ignore"):
        mends = close & (places >= 1) & (np.abs(own - to) <= near)
    own[mends] = to[mends]
    is_good &= ~(close & ~mends)
    return int(np.count_nonzero(own != before[0]) + np.count_nonzero(places != before[1]))


def _least_of_slots(values: Integers, counts: Integers, most: int) -> Integers:
    """Return the smallest value of each slot's tokens, or the largest possible value for a slot without tokens."""
    found = np.full(counts.size, most, np.int64)
    np.minimum.at(found, np.repeat(np.arange(counts.size), counts), values)
    return found
