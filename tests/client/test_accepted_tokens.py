"""AcceptedTokens: what a request has accepted is what a plain list says, whatever else came and ended meanwhile."""

import numpy as np
import pytest

from tokenbus.client import accepted_tokens
from tokenbus.client.accepted_tokens import AcceptedTokens


@pytest.mark.parametrize(("merged", "spare"), [(1, 0), (3, 0), (3, 10), (256, 65_536)])
def test_tokens_are_those_of_plain_lists(monkeypatch: pytest.MonkeyPatch, merged: int, spare: int) -> None:
    monkeypatch.setattr(accepted_tokens, "_MERGED", merged)
    monkeypatch.setattr(accepted_tokens, "_SPARE", spare)
    drawn = np.random.default_rng(46)
    found, plain, serials = AcceptedTokens(), dict[int, list[int]](), 0
    for _ in range(150):
        if drawn.random() < 0.3 or not plain:
            serials += 1
            found.open(serials)
            plain[serials] = []
        if drawn.random() < 0.25:
            ended = int(drawn.choice(list(plain)))
            found.close(ended, len(plain.pop(ended)))
        rows = drawn.permutation(list(plain))[: drawn.integers(0, 5)]
        counts = drawn.integers(0, 4, rows.size)
        tokens = drawn.integers(0, 50_000, counts.sum()).astype(np.uint32)
        found.add(rows.astype(np.int64), counts, tokens)
        begins = np.cumsum(counts) - counts
        for serial, begin, count in zip(rows.tolist(), begins.tolist(), counts.tolist(), strict=True):
            plain[serial] += tokens[begin : begin + count].tolist()
        assert {serial: found.of(serial).tolist() for serial in plain} == plain


def test_ended_requests_free_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays is at most the tokens of open requests twice, and a fixed number."""
    monkeypatch.setattr(accepted_tokens, "_SPARE", 100)
    found = AcceptedTokens()
    found.open(1)
    found.add(np.array([1]), np.array([50]), np.zeros(50, np.uint32))
    for serial in range(2, 200):
        found.open(serial)
        found.add(np.array([serial]), np.array([10]), np.zeros(10, np.uint32))
        found.close(serial, 10)
        held = sum(rows.token_ids.size for rows in (*found._merged, *found._steps))
        assert held <= 2 * 50 + 100 + 10
