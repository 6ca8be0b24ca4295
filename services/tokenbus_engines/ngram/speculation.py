"""Speculation: tokens that the draft proposes and the target verifies, by rejection sampling (Leviathan, Chen)."""

from typing import NamedTuple

import numpy as np

from tokenbus_engines.ngram.counting import NOBODY, Ids
from tokenbus_engines.ngram.mixing import Floats
from tokenbus_engines.ngram.model import WIDTH, Model
from tokenbus_engines.ngram.sampling import Knobs, Masses, chances_of, masses_of
from tokenbus_engines.rng import ACCEPT, DRAFT, FINAL, Words, uniforms

_BEHIND_ALL = 1 << 30
"""A place that no tail has."""


class Going(NamedTuple):
    """Of rows: where requests are, and how they go on."""

    contexts: Ids
    positions: Ids
    """The place of the next token in the output."""
    seeds: Words
    """Mixed."""
    knobs: Knobs

    def of(self, rows: Ids) -> "Going":
        """Return some rows."""
        return Going(self.contexts[rows], self.positions[rows], self.seeds[rows], self.knobs.of(rows))


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


def propose(model: Model, going: Going, count: int, given: Ids | None = None) -> Drafted:
    """Let the draft go on for some tokens; those that were given (and are not nobody) stand where they were given.

    What is given must be in the draft's line.
    """
    rows = going.contexts.size
    shape = (rows, count)
    tokens, places, own_places = (np.empty(shape, np.int64) for _ in range(3))
    chances = np.empty(shape)
    contexts = np.empty((rows, count + 1), np.int64)
    contexts[:, 0] = going.contexts
    positions = going.positions[:, None] + np.arange(count)
    numbers = uniforms(going.seeds[:, None], positions, DRAFT)
    for turn in range(count):
        at = contexts[:, turn]
        drafts = model.drafts[at]
        masses = masses_of(model, drafts, going.knobs, with_tail=False)
        drawn = masses.drawn(numbers[:, turn])
        if given is not None:
            wanted = given[:, turn]
            has = (wanted != NOBODY).nonzero()[0]
            drawn[has] = model.places(drafts[has], wanted[has])
        own_places[:, turn] = drawn
        chances[:, turn] = masses.of_places(drawn)
        tokens[:, turn] = model.ids[drafts, drawn]
        places[:, turn] = model.draft_places[at, drawn]
        contexts[:, turn + 1] = model.after(at, places[:, turn], tokens[:, turn])
    return Drafted(tokens, contexts, places, own_places, chances)


def single(model: Model, going: Going) -> Emitted:
    """Draw one token for each row from the target."""
    numbers = uniforms(going.seeds, going.positions, FINAL)
    places = masses_of(model, going.contexts, going.knobs).drawn(numbers)
    tokens = model.tokens(going.contexts, places)
    after = model.after(going.contexts, places, tokens)
    ones = np.ones(places.size, np.int64)
    return Emitted(tokens[:, None], going.contexts[:, None], places[:, None], ones, after)


def verify(model: Model, going: Going, drafted: Drafted) -> Emitted:
    """Accept drafts as the target allows, and draw one token more, so that all come as if from the target alone.

    A draft of chance q that the target gives p is accepted with min(1, p / q); after the first that is not, a token is
    drawn from what p has more than q, and after the last a token from the target.
    """
    rows, count = drafted.tokens.shape
    flat = drafted.contexts[:, :-1].ravel()
    wanted = chances_of(model, flat, drafted.places.ravel(), going.knobs.repeated(count))
    positions = going.positions[:, None] + np.arange(count)
    numbers = uniforms(going.seeds[:, None], positions, ACCEPT)
    is_rejected = np.ones((rows, count + 1), np.bool_)
    np.greater_equal(numbers * drafted.chances, wanted.reshape(rows, count), out=is_rejected[:, :-1])
    accepted = np.argmax(is_rejected, axis=1)
    everyone = np.arange(rows)
    last = drafted.contexts[everyone, accepted]
    final = _final(model, Going(last, going.positions + accepted, going.seeds, going.knobs), accepted < count)
    final_tokens = model.tokens(last, final)
    nobody = np.zeros((rows, 1), np.int64)
    tokens, places = np.hstack([drafted.tokens, nobody]), np.hstack([drafted.places, nobody])
    tokens[everyone, accepted], places[everyone, accepted] = final_tokens, final
    return Emitted(tokens, drafted.contexts, places, accepted + 1, model.after(last, final, final_tokens))


def _final(model: Model, going: Going, is_rejected: np.ndarray) -> Ids:
    """Draw the last token of each row: from what is left where a draft was rejected, or from the target."""
    masses = masses_of(model, going.contexts, going.knobs)
    numbers = uniforms(going.seeds, going.positions, FINAL)
    places = masses.drawn(numbers)
    rejected = is_rejected.nonzero()[0]
    if rejected.size:
        found = _from_residual(model, going.of(rejected), masses.of(rejected), numbers[rejected])
        places[rejected] = np.where(found == NOBODY, places[rejected], found)
    return places


def _from_residual(model: Model, going: Going, masses: Masses, numbers: Floats) -> Ids:
    """Draw places by what the target gives to tokens beyond what the draft gave; nobody where rounding left nothing."""
    drafts = model.drafts[going.contexts]
    rows = np.arange(drafts.size)
    theirs = np.zeros((rows.size, WIDTH + 1))  # what is not in the draft's line is never proposed
    theirs[:, :-1] = masses_of(model, drafts, going.knobs, with_tail=False).line()
    same = model.places_in_draft.take(going.contexts, 0) + (rows * (WIDTH + 1))[:, None]
    parts = masses.line()
    parts -= theirs.ravel().take(same)
    cumulated = np.cumsum(np.maximum(parts, 0.0, out=parts), axis=1)
    in_line, each = cumulated[:, -1], masses.each / masses.total
    total = in_line + masses.kept_tail * each
    places = Masses(cumulated, masses.kept, each, masses.kept_tail, in_line, total).drawn(numbers)
    places[total <= 0] = NOBODY
    crossed = model.is_crossed[going.contexts].nonzero()[0]
    if crossed.size:
        tail = _Tail(each[crossed], masses.kept_tail[crossed], theirs[crossed, :-1])
        draft_places = model.draft_places[going.contexts[crossed]].astype(np.int64)
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
    return np.where(total > 0, places, NOBODY)
