"""Sampling: a context's probabilities after temperature, top-k and top-p, and tokens drawn from them.

A row's result follows from that row alone, bit by bit: everything is computed along its own line, and what is
looked up for a temperature of one was computed by the same steps.
"""

from typing import NamedTuple, Self

import numpy as np

from tokenbus_engines.ngram.model import WIDTH, Floats, Ids, Model
from tokenbus_engines.sampling import Uniforms

_TINY = float(np.finfo(np.float64).tiny)
"""In the place of a divisor that may be zero where the quotient is not used."""


class SamplingParams(NamedTuple):
    """Of rows: how their tokens are chosen."""

    coldness: Floats
    """What logprobs are multiplied by: one over the temperature."""
    top_k: Ids
    """How many tokens are kept, at most; one where the most probable is wanted."""
    top_p: Floats
    """How much of the probability is kept."""

    def of(self, rows: Ids) -> Self:
        """Return those of some rows."""
        return type(self)(self.coldness[rows], self.top_k[rows], self.top_p[rows])

    def repeated(self, times: int) -> Self:
        """Return each row's as often."""
        return type(self)(self.coldness.repeat(times), self.top_k.repeat(times), self.top_p.repeat(times))


class Masses(NamedTuple):
    """Of rows: how probable their tokens are, as multiples of the most probable one's probability."""

    cumulated: Floats
    """Of rows, a line each: those of the context's line added up."""
    kept: Ids
    """How many tokens of the line may be drawn."""
    each: Floats
    """The probability of one token of the tail."""
    kept_tail: Ids
    """How many tokens of the tail may be drawn, from the lowest id."""
    in_line: Floats
    """The sum of what may be drawn of the line."""
    total: Floats
    """The sum of all that may be drawn."""

    def of(self, rows: Ids) -> Self:
        """Return those of some rows."""
        lines, sums = self.cumulated[rows], (self.in_line[rows], self.total[rows])
        return type(self)(lines, self.kept[rows], self.each[rows], self.kept_tail[rows], *sums)

    def of_places(self, places: Ids) -> Floats:
        """Return the probability of the token at each row's place."""
        rows = np.arange(places.size)
        near = np.minimum(places, WIDTH - 1)
        masses = self.cumulated[rows, near] - np.where(near > 0, self.cumulated[rows, near - 1], 0.0)
        is_behind = places >= WIDTH
        masses = np.where(is_behind, self.each, masses)
        may = np.where(is_behind, places - WIDTH < self.kept_tail, places < self.kept)
        return np.asarray(np.where(may, masses, 0.0) / self.total)

    def line(self) -> Floats:
        """Return the probabilities of the tokens of each row's line."""
        masses = self.cumulated / self.total[:, None]
        masses[:, 1:] -= masses[:, :-1].copy()
        if (self.kept < WIDTH).any():
            masses *= np.arange(WIDTH) < self.kept[:, None]
        return masses

    def drawn(self, numbers: Uniforms) -> Ids:
        """Return a place for each row by a number from 0 to below 1."""
        wanted = numbers * self.total
        places: Ids = (self.cumulated > wanted[:, None]).argmax(1)
        beyond = (wanted >= self.in_line).nonzero()[0]
        if beyond.size:
            ordinals = (wanted[beyond] - self.in_line[beyond]) / np.maximum(self.each[beyond], _TINY)
            ordinals = np.minimum(ordinals.astype(np.int64), self.kept_tail[beyond] - 1)
            # Where nothing of the tail may be drawn, rounding went past the last of the line.
            places[beyond] = np.where(ordinals >= 0, WIDTH + ordinals, self.kept[beyond] - 1)
        return places


def _tempered(model: Model, contexts: Ids, coldness: Floats) -> tuple[Floats, Floats]:
    """Return each context's line added up at its temperature, and the probability of one token of its tail."""
    powers = np.exp(model.below(contexts) * coldness[:, None].astype(np.float32))
    return np.cumsum(powers, axis=1, dtype=np.float64), np.exp(model.tail_below[contexts] * coldness)


def masses_of(model: Model, contexts: Ids, params: SamplingParams, *, with_tail: bool = True) -> Masses:
    """Return the probabilities of each context's tokens as each row's params make them.

    Without the tail, what of it would be kept is not drawn.
    """
    others = (params.coldness != 1).nonzero()[0]
    if others.size == contexts.size:
        cumulated, each = _tempered(model, contexts, params.coldness)
    else:
        cumulated, each = model.cumulated.take(contexts, 0), model.tail_mass[contexts]
        if others.size:
            cumulated[others], each[others] = _tempered(model, contexts[others], params.coldness[others])
    rows = np.arange(contexts.size)
    kept = np.minimum(params.top_k, WIDTH)
    kept_tail = params.top_k - kept
    cut = (params.top_p < 1).nonzero()[0]
    if cut.size:
        lines = cumulated if cut.size == rows.size else cumulated.take(cut, 0)
        most, most_tail = kept[cut], kept_tail[cut]
        in_line = lines[np.arange(cut.size), most - 1]
        limits = params.top_p[cut] * (in_line + most_tail * each[cut])
        is_enough = lines >= limits[:, None]
        kept[cut] = np.where(is_enough[:, -1], np.minimum(is_enough.argmax(1) + 1, most), most)
        missing = np.maximum(limits - in_line, 0.0) / np.maximum(each[cut], _TINY)
        kept_tail[cut] = np.minimum(np.ceil(missing), most_tail).astype(np.int64)
    if not with_tail:
        kept_tail = np.zeros(rows.size, np.int64)
    in_line = cumulated[rows, kept - 1]
    return Masses(cumulated, kept, each, kept_tail, in_line, in_line + kept_tail * each)


def chances_of(model: Model, contexts: Ids, places: Ids, params: SamplingParams) -> Floats:
    """Return the probability of the token at each row's place, as its params make it."""
    near = np.minimum(places, WIDTH - 1)
    masses = model.cumulated[contexts, near] - np.where(near > 0, model.cumulated[contexts, near - 1], 0.0)
    found = np.where(places < WIDTH, masses, model.tail_mass[contexts]) / model.total[contexts]
    others = ((params.coldness != 1) | (params.top_p < 1) | (params.top_k < model.vocabulary_size)).nonzero()[0]
    if others.size:
        found[others] = masses_of(model, contexts[others], params.of(others)).of_places(places[others])
    return np.asarray(found)
