"""Tokens that can be computed again: the ground truth that tests, campaigns and benchmarks compare with.

Which token a request has at a position, its logprob, rank and alternatives follow from the request's key and the
position alone, wherever and however often they are computed.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_engines.sampling import Words, mixed

VOCABULARY_SIZE = 50_000
_RANKS = 4


class TrueTokens(NamedTuple):
    """Some tokens, and what is true of each."""

    ids: npt.NDArray[np.uint32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.uint32]


def draws(keys: Words, positions: npt.NDArray[np.integer]) -> Words:
    """Return the number that everything about the token of each key and position follows from."""
    return mixed(keys ^ mixed(positions.astype(np.uint64)))


def sampled(numbers: Words) -> TrueTokens:
    """Return each number's token: one of the first few of its alternatives."""
    places = (numbers >> np.uint64(40)) % np.uint64(_RANKS)
    return TrueTokens(_ids(numbers, places), _logprobs(numbers, places), (places + np.uint64(1)).astype(np.uint32))


def alternatives(
    numbers: Words, top_ks: npt.NDArray[np.integer]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
    """Return the first alternatives of each number, as many as each wants, the most probable first."""
    wanted = top_ks.astype(np.intp)
    begins = np.cumsum(wanted) - wanted
    places = (np.arange(wanted.sum(), dtype=np.intp) - np.repeat(begins, wanted)).astype(np.uint64)
    owners = np.repeat(numbers, wanted)
    return _ids(owners, places), _logprobs(owners, places)


def true_tokens(key: int, begin: int, end: int) -> TrueTokens:
    """Return the tokens that a request has from one position to before another."""
    positions = np.arange(begin, end, dtype=np.uint64)
    return sampled(draws(np.full(positions.size, key, np.uint64), positions))


def _ids(numbers: Words, places: Words) -> npt.NDArray[np.uint32]:
    return ((numbers % np.uint64(VOCABULARY_SIZE) + places) % np.uint64(VOCABULARY_SIZE)).astype(np.uint32)


def _logprobs(numbers: Words, places: Words) -> npt.NDArray[np.float32]:
    offset = ((numbers >> np.uint64(50)) % np.uint64(64)).astype(np.float32) / np.float32(64)
    return -(offset + places.astype(np.float32) / np.float32(4) + np.float32(0.125))
