"""Chance: numbers that follow from a request's seed and a token's place alone, so that no neighbour changes them."""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
Uniforms = npt.NDArray[np.float64]

DRAFT, ACCEPT, FINAL = 0, 1, 2
"""What a number is drawn for; each token has one of its own for each."""
_PURPOSES = np.uint64(4)
_COUNTERS = 1 << 63
"""Where counters begin: seeds are often small numbers, and a counter that is mixed like one would cancel it out."""
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


def uniforms(mixed_seeds: Words, positions: Places, purpose: int) -> Uniforms:
    """Return a number from 0 to below 1 for each seed, which was mixed already, and position in the output."""
    counters = positions.astype(np.uint64)
    counters *= _PURPOSES
    counters += np.uint64(_COUNTERS + purpose)
    words = mixed(mixed_seeds ^ mixed(counters))
    words >>= _UNUSED_BITS
    return np.asarray(words * 2.0**-53, np.float64)
