"""Speculation: tokens drawn as each request wants them, drafts that the target keeps, and drafts that may follow."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_engines.paddle.network import Tensor
from tokenbus_engines.paddle.tokenizer import VOCABULARY_SIZE
from tokenbus_engines.sampling import Words, accepted, uniforms

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]
Further = Callable[[int, Tensor, Ids], tuple[Tensor, Logits]]
"""A draft head: takes its number, the state before it and the tokens chosen, and returns its state and its logits."""

DRAFT, ACCEPT, FINAL = 1, 2, 3
"""What a random number is drawn for."""


class SamplingParams(NamedTuple):
    """Of rows: how their requests want tokens to be chosen."""

    temperatures: Floats
    """0: the most probable token."""
    top_ks: Ids
    """0: all tokens."""
    top_ps: Floats
    seeds: Words

    def of(self, rows: npt.NDArray[np.integer] | npt.NDArray[np.bool_]) -> "SamplingParams":
        """Return those of some rows."""
        return SamplingParams(self.temperatures[rows], self.top_ks[rows], self.top_ps[rows], self.seeds[rows])


class Drafts(NamedTuple):
    """Of rows: the tokens that were proposed to follow, from the left, and the logits that they were drawn from."""

    tokens: Ids
    logits: Logits
    counts: Ids


class Fronts(NamedTuple):
    """Of rows: where drafting begins."""

    states: Tensor
    """What describes the position that the last token was drawn after."""
    tokens: Ids
    """The last token."""
    positions: Ids
    """The place of the next token in the row's output."""
    counts: Ids
    """How many drafts are wanted."""


class Verified(NamedTuple):
    """Of rows: the tokens that came of a step, from the left: the drafts that were kept, and one more."""

    tokens: Ids
    counts: Ids


def probabilities(logits: npt.NDArray[np.float32], params: SamplingParams) -> Floats:
    """Return the distribution that each line of [rows, ..., vocabulary] is drawn from."""
    extra = (1,) * (logits.ndim - 1)
    temperatures = params.temperatures.reshape(-1, *extra)
    greedy = temperatures == 0
    scaled = logits.astype(np.float64)
    scaled = (scaled - scaled.max(axis=-1, keepdims=True)) / np.where(greedy, 1.0, temperatures)
    weights = np.exp(scaled)
    weights = _truncated(weights, params.top_ks.reshape(-1, *extra), params.top_ps.reshape(-1, *extra))
    if greedy.any():
        best = np.arange(logits.shape[-1]) == logits.argmax(axis=-1)[..., None]
        weights = np.where(greedy, best, weights)
    found: Floats = weights / weights.sum(axis=-1, keepdims=True)
    return found


def drawn(distribution: Floats, chances: Floats) -> Ids:
    """Return the token that each line's chance leads to; none that is impossible."""
    sums = distribution.cumsum(axis=-1)
    below = (sums <= (chances * sums[..., -1])[..., None]).sum(axis=-1)
    last = distribution.shape[-1] - 1 - (distribution[..., ::-1] > 0).argmax(axis=-1)
    found: Ids = np.minimum(below, last).astype(np.int64)
    return found


def _truncated(weights: Floats, top_ks: Ids, top_ps: Floats) -> Floats:
    """Return the weights without those that top-k, and then top-p of what is left, exclude; ties by the lower id."""
    limits = np.where(top_ks == 0, weights.shape[-1], top_ks)
    if (limits >= weights.shape[-1]).all() and (top_ps >= 1).all():
        return weights
    order = np.argsort(-weights, axis=-1, kind="stable")
    ranked = np.take_along_axis(weights, order, axis=-1)
    ranked = np.where(np.arange(weights.shape[-1]) < limits, ranked, 0)
    before = ranked.cumsum(axis=-1) - ranked
    kept = before < top_ps * ranked.sum(axis=-1, keepdims=True)
    result = np.zeros_like(weights)
    np.put_along_axis(result, order, np.where(kept, ranked, 0), axis=-1)
    return result


def verified(logits: Logits, drafts: Drafts, params: SamplingParams, positions: Ids) -> Verified:
    """Return the tokens of each row, whose first one has the given place in its output.

    `logits` are the target's: [rows, drafts + 1, vocabulary]. A draft is kept with the probability min(1, p/q). The
    first that is not gives way to a token of what the target has more of than the drafts' distribution; where all are
    kept, one more token follows. So every token comes with the target's own probability.
    """
    rows, most = drafts.tokens.shape
    target = probabilities(logits, params)
    proposal = probabilities(drafts.logits, params)
    wanted, offered = (_of_tokens(each[:, :most], drafts.tokens) for each in (target, proposal))
    chances = uniforms(params.seeds[:, None], positions[:, None] + np.arange(most), ACCEPT)
    kept = accepted(wanted, offered, chances, drafts.counts)
    every = np.arange(rows)
    source = target[every, kept]
    refused = np.flatnonzero(kept < drafts.counts)
    if refused.size:
        rest = np.maximum(source[refused] - proposal[refused, kept[refused]], 0)
        # Only rounding leaves nothing over: then the two distributions are the same.
        source[refused] = np.where(rest.sum(axis=-1, keepdims=True) > 0, rest, source[refused])
    tokens = np.zeros((rows, most + 1), np.int64)
    tokens[:, :most] = drafts.tokens
    tokens[every, kept] = drawn(source, uniforms(params.seeds, positions + kept, FINAL))
    return Verified(tokens, kept + 1)


def drafted(further: Further, fronts: Fronts, params: SamplingParams) -> Drafts:
    """Return as many drafts as wanted to follow each row's last token."""
    found = np.zeros((fronts.tokens.size, int(fronts.counts.max(initial=0))), np.int64)
    lines = []
    states, tokens = fronts.states, fronts.tokens
    for place in range(found.shape[1]):
        states, logits = further(place, states, tokens)
        chances = uniforms(params.seeds, fronts.positions + place, DRAFT)
        found[:, place] = tokens = drawn(probabilities(logits, params), chances)
        lines.append(logits)
    together = np.stack(lines, axis=1) if lines else np.zeros((fronts.tokens.size, 0, VOCABULARY_SIZE), np.float32)
    return Drafts(found, together, fronts.counts)


def _of_tokens(distributions: Floats, tokens: Ids) -> Floats:
    """Return the probability of each token in its own line."""
    found: Floats = np.take_along_axis(distributions, tokens[..., None], axis=-1)[..., 0]
    return found
