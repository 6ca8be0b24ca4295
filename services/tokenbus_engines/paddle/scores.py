"""Scores: logprobs, ranks and the most probable alternatives of tokens, from logits on the host."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_gpu_ops import token_logprobs


class Scores(NamedTuple):
    """Of tokens: what the model thinks of each."""

    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.uint32]
    alternative_token_ids: npt.NDArray[np.uint32]
    """The most probable first, ties by the lower id: as many for each token as were asked for."""
    alternative_logprobs: npt.NDArray[np.float32]


def scored(logits: npt.NDArray[np.float32], tokens: npt.NDArray[np.integer], top_k: int) -> Scores:
    """Return the scores of one token for each line of logits, which are all numbers."""
    found = token_logprobs(logits, tokens, top_k)
    lines = (len(tokens), top_k)
    return Scores(
        found.logprobs,
        found.ranks,
        found.alternative_token_ids.reshape(lines),
        found.alternative_logprobs.reshape(lines),
    )
