"""The ground truth: what follows from a key and a position, and from nothing else."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.engines import synthetic

KEYS = st.integers(1, 2**64 - 1)
_MASK = 2**64 - 1


def plain_mixed(word: int) -> int:
    """Return splitmix64 of a word, in Python's own integers."""
    word = (word + 0x9E3779B97F4A7C15) & _MASK
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)


@given(KEYS, st.integers(0, 2**31 - 1))
def test_token_is_what_the_definition_says(key: int, position: int) -> None:
    number = plain_mixed(key ^ plain_mixed(position))
    place = (number >> 40) % 4
    for begin in (position, max(0, position - 3)):  # any cut of a request is the same
        found = synthetic.true_tokens(key, begin, position + 1)
        assert found.ids[-1] == (number % 50_000 + place) % 50_000
        assert found.ranks[-1] == place + 1
        assert found.logprobs[-1] == -((number >> 50) % 64 / 64 + place / 4 + 0.125)


@given(st.lists(KEYS, min_size=1, max_size=5), st.data())
def test_alternatives_are_in_order_and_hold_the_token(keys: list[int], data: st.DataObject) -> None:
    """Alternatives fall in value, and a token among them is at its own rank with its own logprob (case 15)."""
    top_ks = np.array([data.draw(st.integers(0, 6)) for _ in keys])
    numbers = synthetic.draws(np.array(keys, np.uint64), np.zeros(len(keys), np.uint64))
    tokens = synthetic.sampled(numbers)
    ids, logprobs = synthetic.alternatives(numbers, top_ks)
    ends = np.cumsum(top_ks)
    assert ids.size == logprobs.size == ends[-1]
    for place, (end, top_k) in enumerate(zip(ends.tolist(), top_ks.tolist(), strict=True)):
        mine = ids[end - top_k : end].tolist(), logprobs[end - top_k : end].tolist()
        assert mine[1] == sorted(mine[1], reverse=True)
        assert len(set(mine[0])) == top_k
        rank = int(tokens.ranks[place])
        if rank <= top_k:
            assert mine[0][rank - 1] == tokens.ids[place]
            assert mine[1][rank - 1] == tokens.logprobs[place]


def test_token_zero_occurs() -> None:
    """Token id 0 is among the tokens that requests get, so that code that takes it for none is found out (case 10)."""
    numbers = synthetic.draws(np.arange(1, 200_000, dtype=np.uint64), np.zeros(199_999, np.uint64))
    assert 0 in synthetic.sampled(numbers).ids
