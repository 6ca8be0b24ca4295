"""What the row checks found out and the checks of the ragged columns need."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Shape(NamedTuple):
    """The sizes that a batch's counts demand of its ragged columns."""

    tokens: int
    scored_tokens: int
    alternatives: int
    proposals: int
    all_scored: bool
    """Whether every token has a logprob, so that tokens and scored tokens are the same."""
    uniform_top_k: int
    """How many alternatives each token has, where all have the same; else 0."""
    top_k_by_scored_token: npt.NDArray[np.intp] | None
    """How many alternatives each scored token has, where that differs; else None."""
