"""Emission: a step's tokens as the arrays that engines return."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tokenbus_contracts import BatchKind, RowStatus, SpeculativeMethod, StepPhase
from tokenbus_engines.ngram.block import Block, Outcome
from tokenbus_engines.ngram.counting import Ids
from tokenbus_engines.ngram.model import WIDTH, Model
from tokenbus_engines.ngram.rows import Rows
from tokenbus_engines.ngram.schedule import Plan
from tokenbus_services.worker.step import Array, StepArrays


class Proposed(NamedTuple):
    """What a step proposes for the requests that it hands off."""

    counts: Ids
    """Of the block's rows."""
    tokens: Ids
    states: Mapping[int, bytes]


def target_arrays(  # noqa: PLR0913, PLR0917 - a step's parts
    model: Model, rows: Rows, plan: Plan, block: Block, result: Outcome, proposed: Proposed | None, speculate: int
) -> StepArrays:
    """Return the target's batch: a row for each slot of the plan, sorted by what was computed for it."""
    slots = np.concatenate([block.slots, plan.prefilling, plan.preempted, plan.aborted])
    others = slots.size - block.slots.size
    statuses = [result.statuses]
    for status, group in zip(
        (RowStatus.PREFILLING, RowStatus.PREEMPTED, RowStatus.ABORTED),
        (plan.prefilling, plan.preempted, plan.aborted),
        strict=True,
    ):
        statuses.append(np.full(group.size, status, np.uint8))
    emitted = block.emitted
    verified = np.zeros(slots.size, np.uint8)
    if block.drafted is not None:
        verified[: plan.decode.size] = speculate
    is_trimmed = (result.kept < emitted.counts).any()
    return StepArrays(
        request_keys=rows.keys[slots],
        positions=rows.positions[slots],
        token_counts=_with_zeros(emitted.counts, others),
        token_ids=emitted.tokens[_mask(emitted.counts, emitted.tokens.shape[1])],
        statuses=np.concatenate(statuses),
        kept_counts=_with_zeros(result.kept, others) if is_trimmed else None,
        draft_token_counts=verified,
        proposal_token_ids=None if proposed is None else proposed.tokens,
        proposal_counts=None if proposed is None else _with_zeros(proposed.counts, others),
        index_to_batch_id=_batch_order(rows.serials[slots]),
        phase=_phase(plan),
        method=SpeculativeMethod.NGRAM if speculate else SpeculativeMethod.NONE,
        draft_follows=_wants_draft(rows, block),
        states={} if proposed is None else proposed.states,
        **_scores(model, rows, slots, emitted.contexts, emitted.places, emitted.counts),
    )


def draft_arrays(model: Model, rows: Rows, target: StepArrays, block: Block) -> StepArrays | None:
    """Return the draft's batch, if anybody wants it: the target's rows, with what was proposed for those who do."""
    drafted = block.drafted
    if drafted is None or not target.draft_follows:
        return None
    drafting, count = drafted.tokens.shape
    slots = block.slots[:drafting]
    counts = np.where(rows.wants_drafts[slots], count, 0)
    rest = target.request_keys.size - drafting
    padding = np.full((target.request_keys.size - drafting), -1, np.int64)
    contexts = model.drafts[drafted.contexts[:, :count]]
    return StepArrays(
        request_keys=target.request_keys,
        positions=target.positions,
        token_counts=_with_zeros(counts, rest),
        token_ids=drafted.tokens[_mask(counts, count)],
        index_to_batch_id=target.index_to_batch_id,
        kind=BatchKind.DRAFT,
        phase=target.phase,
        method=target.method,
        **_scores(model, rows, np.concatenate([slots, padding]), contexts, drafted.own_places, counts),
    )


def _wants_draft(rows: Rows, block: Block) -> bool:
    drafted = block.drafted
    return drafted is not None and bool(rows.wants_drafts[block.slots[: drafted.tokens.shape[0]]].any())


def _scores(  # noqa: PLR0913, PLR0917 - a block's parts
    model: Model, rows: Rows, slots: Ids, contexts: Ids, places: Ids, counts: Ids
) -> dict[str, Array]:
    """Return what is known of the tokens of those who want it; slots below zero are nobody's."""
    scored = rows.scored[slots] & (slots >= 0)
    mine = scored[: counts.size].nonzero()[0]
    if not mine.size:
        return {}
    top_ks = np.where(scored, rows.top_logprobs[slots], 0).astype(np.uint8)
    mask = _mask(counts[mine], places.shape[1])
    contexts, places = contexts[mine, : places.shape[1]][mask], places[mine][mask]
    near, is_in_line = np.minimum(places, WIDTH - 1), places < WIDTH
    scores: dict[str, Array] = {
        "logprobs": np.where(is_in_line, model.logprobs[contexts, near], model.tail_logprob),
        "ranks": np.where(is_in_line, model.ranks[contexts, near], np.uint32(WIDTH + 1)),
        "scored": scored,
    }
    wanted = top_ks[mine]
    most = int(wanted.max())
    if not most:
        return scores
    ids, logprobs = model.ids[contexts, :most], model.logprobs[contexts, :most]
    if int(wanted.min()) == most:
        ids, logprobs = ids.ravel(), logprobs.ravel()
    else:
        cut = np.arange(most) < np.repeat(wanted, counts[mine])[:, None]
        ids, logprobs = ids[cut], logprobs[cut]
    return scores | {"alternative_token_ids": ids, "alternative_logprobs": logprobs, "top_ks": top_ks}


def _mask(counts: Ids, width: int) -> np.ndarray:
    return np.asarray(np.arange(width) < counts[:, None])


def _with_zeros(counts: Ids, others: int) -> Ids:
    counts = counts.astype(np.uint8)
    return np.concatenate([counts, np.zeros(others, np.uint8)]) if others else counts


def _batch_order(serials: Ids) -> Ids | None:
    """Return each row's place in the order of admission; none is needed where the rows are in it."""
    if (serials[1:] > serials[:-1]).all():
        return None
    places = np.empty(serials.size, np.int64)
    places[np.argsort(serials)] = np.arange(serials.size)
    return places


def _phase(plan: Plan) -> StepPhase:
    prefills = plan.first.size + plan.prefilling.size
    if plan.decode.size and prefills:
        return StepPhase.MIXED
    return StepPhase.PREFILL if prefills else StepPhase.DECODE
