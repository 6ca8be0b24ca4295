"""A step: which tokens the requests get and what becomes of each, as the arrays that are published.

Nothing of a request changes here, so that a step that fails can be computed again.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import BatchKind, RowStatus, SpeculativeMethod
from tokenbus_engines.emission import batch_order, phase_of, raise_failed
from tokenbus_engines.ngram.model import WIDTH, Ids, Model
from tokenbus_engines.ngram.requests import Requests
from tokenbus_engines.ngram.schedule import Plan
from tokenbus_engines.ngram.speculation import Drafted, Emitted, propose, single, verify
from tokenbus_services.worker.step import Array, StepArrays


class Block(NamedTuple):
    """What a step computed for some slots: those that go on come first, then those with their first token."""

    slots: Ids
    emitted: Emitted
    drafted: Drafted | None
    """Of the slots that go on, if the draft proposed anything."""


class Outcome(NamedTuple):
    """Of a block's rows: how many tokens are kept, and what becomes of the request."""

    kept: Ids
    statuses: npt.NDArray[np.uint8]
    tails: dict[int, bytes]
    """By slot: the end of the output's bytes, of requests with stops of their own."""


class Proposed(NamedTuple):
    """What a step proposes for the requests that it hands off."""

    counts: Ids
    """Of the block's rows."""
    tokens: Ids
    states: Mapping[int, bytes]


def computed(model: Model, requests: Requests, plan: Plan, speculate: int) -> Block:
    """Compute a step: the draft proposes and the target verifies; a first token is the target's alone."""
    decode, first = plan.decode, plan.first
    slots = np.concatenate([decode, first]) if first.size else decode
    if not (speculate and decode.size):
        return Block(slots, single(model, requests.front(slots)), None)
    front = requests.front(decode)
    given = None
    if requests.has_proposals[decode].any():
        given = requests.proposals[decode]
        given[~requests.has_proposals[decode]] = -1
    drafted = propose(model, front, speculate, given)
    emitted = verify(model, front, drafted)
    if first.size:
        emitted = _below(emitted, single(model, requests.front(first)))
    return Block(slots, emitted, drafted)


def outcome(requests: Requests, block: Block, end_token: int) -> Outcome:
    """Say how many tokens of each row are kept, and whether its request goes on.

    The first of what ends it counts: the end token, one of its own stops, or its length. An EngineStepError names the
    requests whose stops could not be looked for.
    """
    slots, tokens, counts = block.slots, block.emitted.tokens, block.emitted.counts
    room = np.minimum(counts, requests.ends[slots] - requests.positions[slots])
    is_end = (tokens == end_token) & ~requests.ignores_end[slots][:, None]
    stops = np.where(is_end.any(1), np.argmax(is_end, axis=1), tokens.shape[1])
    tails: dict[int, bytes] = {}
    failed: dict[int, Exception] = {}
    for row in requests.has_stops[slots].nonzero()[0].tolist():
        slot = int(slots[row])
        try:
            place, tails[slot] = requests.stops[slot].find(tokens[row, : room[row]].tolist())
        except Exception as error:  # noqa: BLE001 - it ends this request, and no other
            failed[int(requests.keys[slot])] = error
            continue
        if place is not None:
            stops[row] = min(stops[row], place)
    raise_failed(failed)
    kept = np.minimum(room, stops + 1)
    statuses = np.full(slots.size, RowStatus.ACTIVE, np.uint8)
    statuses[requests.positions[slots] + kept >= requests.ends[slots]] = RowStatus.FINISHED_LENGTH
    statuses[stops < room] = RowStatus.FINISHED_STOP
    return Outcome(kept, statuses, tails)


def target_arrays(  # noqa: PLR0913, PLR0917 - a step's parts
    model: Model,
    requests: Requests,
    plan: Plan,
    block: Block,
    result: Outcome,
    proposed: Proposed | None,
    speculate: int,
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
        request_keys=requests.keys[slots],
        positions=requests.positions[slots],
        token_counts=_with_zeros(emitted.counts, others),
        token_ids=emitted.tokens[_mask(emitted.counts, emitted.tokens.shape[1])],
        statuses=np.concatenate(statuses),
        kept_counts=_with_zeros(result.kept, others) if is_trimmed else None,
        draft_token_counts=verified,
        proposal_token_ids=None if proposed is None else proposed.tokens,
        proposal_counts=None if proposed is None else _with_zeros(proposed.counts, others),
        index_to_batch_id=batch_order(requests.serials[slots]),
        phase=phase_of(plan.decode.size, plan.first.size + plan.prefilling.size),
        method=SpeculativeMethod.NGRAM if speculate else SpeculativeMethod.NONE,
        draft_follows=_wants_draft(requests, block),
        states={} if proposed is None else proposed.states,
        **_scores(model, requests, slots, emitted.contexts, emitted.places, emitted.counts),
    )


def draft_arrays(model: Model, requests: Requests, target: StepArrays, block: Block) -> StepArrays | None:
    """Return the draft's batch, if a request wants it: the target's rows, with what was proposed for those."""
    drafted = block.drafted
    if drafted is None or not target.draft_follows:
        return None
    drafting, count = drafted.tokens.shape
    slots = block.slots[:drafting]
    counts = np.where(requests.wants_drafts[slots], count, 0)
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
        **_scores(model, requests, np.concatenate([slots, padding]), contexts, drafted.own_places, counts),
    )


def _wants_draft(requests: Requests, block: Block) -> bool:
    drafted = block.drafted
    return drafted is not None and bool(requests.wants_drafts[block.slots[: drafted.tokens.shape[0]]].any())


def _scores(  # noqa: PLR0913, PLR0917 - a block's parts
    model: Model, requests: Requests, slots: Ids, contexts: Ids, places: Ids, counts: Ids
) -> dict[str, Array]:
    """Return the scores of the tokens of requests that want them; a slot below zero is padding."""
    scored = requests.scored[slots] & (slots >= 0)
    mine = scored[: counts.size].nonzero()[0]
    if not mine.size:
        return {}
    top_ks = np.where(scored, requests.top_logprobs[slots], 0).astype(np.uint8)
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


def _below(upper: Emitted, lower: Emitted) -> Emitted:
    """Return the rows of both; lines of one token have nothing behind it."""
    missing = upper.tokens.shape[1] - lower.tokens.shape[1]

    def _joined(above: Ids, below: Ids) -> Ids:
        return np.concatenate([above, np.pad(below, ((0, 0), (0, missing)), constant_values=-1)])

    return Emitted(
        _joined(upper.tokens, lower.tokens),
        _joined(upper.contexts, lower.contexts),
        _joined(upper.places, lower.places),
        np.concatenate([upper.counts, lower.counts]),
        np.concatenate([upper.after, lower.after]),
    )


def _mask(counts: Ids, width: int) -> np.ndarray:
    return np.asarray(np.arange(width) < counts[:, None])


def _with_zeros(counts: Ids, others: int) -> Ids:
    counts = counts.astype(np.uint8)
    return np.concatenate([counts, np.zeros(others, np.uint8)]) if others else counts
