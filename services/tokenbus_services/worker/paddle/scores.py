"""Scores: logprobs, ranks and the most probable alternatives of tokens, from logits on the host."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Scores(NamedTuple):
    """Of tokens: what the model thinks of each."""

    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.uint32]
    alternative_token_ids: npt.NDArray[np.uint32]
    """The most probable first, ties by the lower id: as many for each token as were asked for."""
    alternative_logprobs: npt.NDArray[np.float32]


def scored(logits: npt.NDArray[np.float32], tokens: npt.NDArray[np.integer], top_k: int) -> Scores:
    """Return the scores of one token for each line of logits."""
    values = logits.astype(np.float64)
    values -= values.max(axis=-1, keepdims=True, initial=-np.inf)
    values -= np.log(np.exp(values).sum(axis=-1, keepdims=True))
    # Ranks and order are of the numbers that are told, so that they never contradict them.
    logprobs = np.minimum(values, 0).astype(np.float32)
    own = np.take_along_axis(logprobs, tokens.astype(np.int64)[:, None], axis=-1)
    ranks = (logprobs > own).sum(axis=-1) + 1
    best = np.argsort(-logprobs, axis=-1, kind="stable")[:, :top_k]
    return Scores(
        own[:, 0], ranks.astype(np.uint32), best.astype(np.uint32), np.take_along_axis(logprobs, best, axis=-1)
    )
