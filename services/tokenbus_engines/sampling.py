"""Sampling that engines share: random numbers that a seed fixes, and the acceptance of drafts.

A number follows from a request's seed, a token's position and its purpose alone, so that neighbours, preemption and
chunks change nothing of a request's output.
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]
Uniforms = npt.NDArray[np.float64]

_PURPOSES = np.uint64(4)
_ADDED = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_UNUSED_BITS = np.uint64(11)


def mixed(words: Words) -> Words:
    """Return splitmix64 of each word."""
    words = words + _ADDED
    words ^= words >> _SHIFTS[0]
    words *= _FACTORS[0]
    words ^= words >> _SHIFTS[1]
    words *= _FACTORS[1]
    words ^= words >> _SHIFTS[2]
    return words


def uniforms(seeds: Words, positions: Positions, purpose: int) -> Uniforms:
    """Return a number from 0 to below 1 for each seed and position in the output.

    Purposes differ in their low two bits; each has numbers of its own at every position.
    """
    counters = positions.astype(np.uint64)
    counters *= _PURPOSES
    counters += np.uint64(purpose)
    words = mixed(seeds ^ mixed(counters))
    words >>= _UNUSED_BITS
    return np.asarray(words * 2.0**-53, np.float64)


def accepted(target: Uniforms, offered: Uniforms, numbers: Uniforms, counts: Counts | None = None) -> Counts:
    """Return how many drafts of each row are accepted: those before the first that is rejected.

    A draft is accepted with probability min(1, target / offered), so that tokens come as if from the target alone. All
    are [rows, drafts]: the probabilities that the target and the draft model give to each draft, and a random
    number. `counts` limits the drafts of each row; without it, all are drafts.
    """
    rows, drafts = numbers.shape
    is_rejected = np.ones((rows, drafts + 1), np.bool_)
    np.greater_equal(numbers * offered, target, out=is_rejected[:, :-1])
    if counts is not None:
        is_rejected[:, :-1] |= np.arange(drafts) >= counts[:, None]
    found: Counts = np.argmax(is_rejected, axis=1)
    return found
