"""Speculation: which drafts the target keeps, and what it says after them, in the target's own distribution."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_engines.paddle.network import Tensor
from tokenbus_engines.paddle.sampling import Floats, Ids, Purpose, Wishes, drawn, probabilities, uniforms
from tokenbus_engines.paddle.shape import VOCABULARY_SIZE

Logits = npt.NDArray[np.float32]
Further = Callable[[int, Tensor, Ids], tuple[Tensor, Logits]]
"""A draft head: takes its number, the state before it and the tokens chosen, and returns its state and its logits."""


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


def verified(logits: Logits, drafts: Drafts, wishes: Wishes, positions: Ids) -> Verified:
    """Return the tokens of each row, whose first one has the given place in its output.

    `logits` are the target's: [rows, drafts + 1, vocabulary]. A draft is kept with the probability min(1, p/q). The
    first that is not gives way to a token of what the target has more of than the drafts' distribution; where all are
    kept, one more token follows. So every token comes with the target's own probability.
    """
    rows, most = drafts.tokens.shape
    target = probabilities(logits, wishes)
    proposal = probabilities(drafts.logits, wishes)
    kept = np.zeros(rows, np.int64)
    for place in range(most):
        token = drafts.tokens[:, place]
        wanted, offered = (_of_tokens(each[:, place], token) for each in (target, proposal))
        chances = uniforms(wishes.seeds, positions + place, Purpose.ACCEPT)
        kept += (kept == place) & (place < drafts.counts) & (chances * offered < wanted)
    every = np.arange(rows)
    source = target[every, kept]
    refused = np.flatnonzero(kept < drafts.counts)
    if refused.size:
        rest = np.maximum(source[refused] - proposal[refused, kept[refused]], 0)
        # Only rounding leaves nothing over: then the two distributions are the same.
        source[refused] = np.where(rest.sum(axis=-1, keepdims=True) > 0, rest, source[refused])
    tokens = np.zeros((rows, most + 1), np.int64)
    tokens[:, :most] = drafts.tokens
    tokens[every, kept] = drawn(source, uniforms(wishes.seeds, positions + kept, Purpose.CHOOSE))
    return Verified(tokens, kept + 1)


def drafted(further: Further, fronts: Fronts, wishes: Wishes) -> Drafts:
    """Return as many drafts as wanted to follow each row's last token."""
    found = np.zeros((fronts.tokens.size, int(fronts.counts.max(initial=0))), np.int64)
    lines = []
    states, tokens = fronts.states, fronts.tokens
    for place in range(found.shape[1]):
        states, logits = further(place, states, tokens)
        chances = uniforms(wishes.seeds, fronts.positions + place, Purpose.DRAFT)
        found[:, place] = tokens = drawn(probabilities(logits, wishes), chances)
        lines.append(logits)
    together = np.stack(lines, axis=1) if lines else np.zeros((fronts.tokens.size, 0, VOCABULARY_SIZE), np.float32)
    return Drafts(found, together, fronts.counts)


def _of_tokens(distribution: Floats, tokens: Ids) -> Floats:
    found: Floats = np.take_along_axis(distribution, tokens[:, None], axis=-1)[:, 0]
    return found
