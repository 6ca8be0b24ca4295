"""Speculation: tokens that the draft proposes and the target verifies, by rejection sampling (Leviathan, Chen)."""

from typing import NamedTuple

import numpy as np

from tokenbus_engines.ngram.model import ABSENT, WIDTH, Floats, Ids, Model
from tokenbus_engines.ngram.sampling import Masses, SamplingParams, chances_of, masses_of
from tokenbus_engines.sampling import Words, accepted, uniforms

DRAFT, ACCEPT, FINAL = (2**63 + place for place in range(3))
"""What a random number is drawn for. Seeds are often small numbers, and a counter like one would cancel it out."""
_BEHIND_ALL = 1 << 30
"""A place that no tail has."""


class Front(NamedTuple):
    """Of rows: where requests are, and how their tokens are chosen."""

    contexts: Ids
    positions: Ids
    """The place of the next token in the output."""
    seeds: Words
    """Mixed."""
    params: SamplingParams

    def of(self, rows: Ids) -> "Front":
        """Return some rows."""
        return Front(self.contexts[rows], self.positions[rows], self.seeds[rows], self.params.of(rows))


class Drafted(NamedTuple):
    """Of rows, a line each: what the draft proposed."""

    tokens: Ids
    contexts: Ids
    """The target's context that each token comes after, and one more: that after the last."""
    places: Ids
    """Of each token in that context."""
    own_places: Ids
    """Of each token in the draft's context."""
    chances: Floats
    """The draft's probability of each token."""


class Emitted(NamedTuple):
    """Of rows, a line each: the tokens that were accepted, and the one after them."""

    tokens: Ids
    contexts: Ids
    """The context that each token comes after."""
    places: Ids
    """Of each token in that context."""
    counts: Ids
    """How many tokens of each line there are."""
    after: Ids
    """The context that each row is in now."""


def propose(model: Model, front: Front, count: int, given: Ids | None = None) -> Drafted:
    """Let the draft propose `count` tokens; a token that is `given`, and not absent, stands in the place of its own.

    What is given must be in the draft's line.
    """
    rows = front.contexts.size
    shape = (rows, count)
    tokens, places, own_places = (np.empty(shape, np.int64) for _ in range(3))
    chances = np.empty(shape)
    contexts = np.empty((rows, count + 1), np.int64)
    contexts[:, 0] = front.contexts
    positions = front.positions[:, None] + np.arange(count)
    numbers = uniforms(front.seeds[:, None], positions, DRAFT)
    for turn in range(count):
        at = contexts[:, turn]
        drafts = model.drafts[at]
        masses = masses_of(model, drafts, front.params, with_tail=False)
        drawn = masses.drawn(numbers[:, turn])
        if given is not None:
            wanted = given[:, turn]
            has = (wanted != ABSENT).nonzero()[0]
            drawn[has] = model.places(drafts[has], wanted[has])
        own_places[:, turn] = drawn
        chances[:, turn] = masses.of_places(drawn)
        tokens[:, turn] = model.ids[drafts, drawn]
        places[:, turn] = model.draft_places[at, drawn]
        contexts[:, turn + 1] = model.after(at, places[:, turn], tokens[:, turn])
    return Drafted(tokens, contexts, places, own_places, chances)


def single(model: Model, front: Front) -> Emitted:
    """Draw one token for each row from the target."""
    numbers = uniforms(front.seeds, front.positions, FINAL)
    places = masses_of(model, front.contexts, front.params).drawn(numbers)
    tokens = model.tokens(front.contexts, places)
    after = model.after(front.contexts, places, tokens)
    ones = np.ones(places.size, np.int64)
    return Emitted(tokens[:, None], front.contexts[:, None], places[:, None], ones, after)


def verify(model: Model, front: Front, drafted: Drafted) -> Emitted:
    """Accept drafts as the target allows, and draw one token more, so that all come as if from the target alone.

    A draft of chance q that the target gives p is accepted with min(1, p / q); after the first that is not, a token is
    drawn from what p has more than q, and after the last a token from the target.
    """
    rows, count = drafted.tokens.shape
    flat = drafted.contexts[:, :-1].ravel()
    wanted = chances_of(model, flat, drafted.places.ravel(), front.params.repeated(count))
    positions = front.positions[:, None] + np.arange(count)
    numbers = uniforms(front.seeds[:, None], positions, ACCEPT)
    kept = accepted(wanted.reshape(rows, count), drafted.chances, numbers)
    every = np.arange(rows)
    last = drafted.contexts[every, kept]
    final = _final(model, Front(last, front.positions + kept, front.seeds, front.params), kept < count)
    final_tokens = model.tokens(last, final)
    room = np.zeros((rows, 1), np.int64)
    tokens, places = np.hstack([drafted.tokens, room]), np.hstack([drafted.places, room])
    tokens[every, kept], places[every, kept] = final_tokens, final
    return Emitted(tokens, drafted.contexts, places, kept + 1, model.after(last, final, final_tokens))


def _final(model: Model, front: Front, is_rejected: np.ndarray) -> Ids:
    """Draw the last token of each row: from what is left where a draft was rejected, or from the target."""
    masses = masses_of(model, front.contexts, front.params)
    numbers = uniforms(front.seeds, front.positions, FINAL)
    places = masses.drawn(numbers)
    rejected = is_rejected.nonzero()[0]
    if rejected.size:
        found = _from_residual(model, front.of(rejected), masses.of(rejected), numbers[rejected])
        places[rejected] = np.where(found == ABSENT, places[rejected], found)
    return places


def _from_residual(model: Model, front: Front, masses: Masses, numbers: Floats) -> Ids:
    """Draw places by what the target gives to tokens beyond what the draft gave; absent where rounding left nothing."""
    drafts = model.drafts[front.contexts]
    rows = np.arange(drafts.size)
    theirs = np.zeros((rows.size, WIDTH + 1))  # what is not in the draft's line is never proposed
    theirs[:, :-1] = masses_of(model, drafts, front.params, with_tail=False).line()
    same = model.places_in_draft.take(front.contexts, 0) + (rows * (WIDTH + 1))[:, None]
    parts = masses.line()
    parts -= theirs.ravel().take(same)
    cumulated = np.cumsum(np.maximum(parts, 0.0, out=parts), axis=1)
    in_line, each = cumulated[:, -1], masses.each / masses.total
    total = in_line + masses.kept_tail * each
    places = Masses(cumulated, masses.kept, each, masses.kept_tail, in_line, total).drawn(numbers)
    places[total <= 0] = ABSENT
    crossed = model.is_crossed[front.contexts].nonzero()[0]
    if crossed.size:
        tail = _Tail(each[crossed], masses.kept_tail[crossed], theirs[crossed, :-1])
        draft_places = model.draft_places[front.contexts[crossed]].astype(np.int64)
        places[crossed] = _from_three_parts(cumulated[crossed], tail, draft_places, numbers[crossed])
    return places


class _Tail(NamedTuple):
    """Of rows: the target's tail, and the probabilities that the tokens of the draft's line have there."""

    each: Floats
    kept: Ids
    theirs: Floats


def _from_three_parts(cumulated: Floats, tail: _Tail, draft_places: Ids, numbers: Floats) -> Ids:
    """Draw from the target's line, of which the sums are given, where the draft's line reaches into the target's tail.

    The parts are the line, the tokens of the tail that the draft proposes, and the rest of the tail.
    """
    may = (draft_places >= WIDTH) & (draft_places - WIDTH < tail.kept[:, None])
    in_tail = np.where(may, np.maximum(tail.each[:, None] - tail.theirs, 0.0), 0.0)
    sums = np.hstack([cumulated, cumulated[:, -1:] + np.cumsum(in_tail, axis=1)])
    known, rest = sums[:, -1], tail.kept - may.sum(1)
    total = known + rest * tail.each
    wanted = numbers * total
    found = (sums > wanted[:, None]).argmax(1)
    places = np.where(found < WIDTH, found, draft_places[np.arange(found.size), found - WIDTH])
    beyond = ((wanted >= known) & (rest > 0)).nonzero()[0]
    if beyond.size:
        ordinals = np.minimum(((wanted - known)[beyond] / tail.each[beyond]).astype(np.int64), rest[beyond] - 1)
        # The tail is counted by id, without those that the draft proposes.
        taken = np.where(may[beyond], draft_places[beyond] - WIDTH, _BEHIND_ALL)
        gaps = np.sort(taken, axis=1) - np.arange(WIDTH)
        places[beyond] = WIDTH + ordinals + (gaps <= ordinals[:, None]).sum(1)
    return np.where(total > 0, places, ABSENT)
