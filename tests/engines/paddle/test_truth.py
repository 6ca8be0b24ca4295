"""What the paddle engine says of tokens equals that of a plain full forward pass: logprobs, and what is beside them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.engines.paddle.needs import NEEDS_PADDLE
from tests.engines.paddle.reference import Array, reference, tokens_of
from tests.engines.runs import Got, asked, paddle
from tokenbus_contracts import Row
from tokenbus_contracts.extras import Extras
from tokenbus_contracts.generated.request_pb2 import Generate, TokenScoring

pytestmark = NEEDS_PADDLE

TOLERANCE = 2e-4
"""In nats: what single precision, caching and batching may differ by from double precision without either."""

STORY = "The sun was shining. That night Paul was at the old mill again. "
REQUESTS = [
    asked(1, STORY, max_tokens=30, temperature=0.0, top_logprobs=20, include_draft_logprobs=True),
    asked(2, "One ", max_tokens=30, seed=1, top_logprobs=0, include_draft_logprobs=True),
    asked(3, STORY * 2, max_tokens=20, seed=2, temperature=1.8, top_logprobs=5, include_draft_logprobs=True),
    asked(4, [0], max_tokens=24, seed=3, temperature=3.0, top_logprobs=3, include_draft_logprobs=True),
    asked(5, "Ida ", max_tokens=16, seed=4, top_p=0.7, top_logprobs=1),
    asked(6, "q", max_tokens=16, seed=5, top_k=3),
    asked(7, STORY, max_tokens=1, seed=6, top_logprobs=20),
]


@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_chunk": 37, "max_running": 2, "slice_steps": 4}, {"speculate": 0}],
    ids=["together", "preempted and in chunks", "no drafts"],
)
def test_logprobs_are_those_of_a_full_forward_pass(options: dict[str, int]) -> None:
    run = paddle(REQUESTS, **{"max_running": 32} | options).to_the_end()
    for generate in REQUESTS:
        check(generate, run.got[generate.request_id])


def check(generate: Generate, got: Got) -> None:
    prompt, output = tokens_of(generate), got.tokens
    states = reference().states([*prompt, *output])[len(prompt) - 1 :]
    expected = reference().logprobs(states)
    checked = 0
    for row in got.rows:
        if row.token_ids.size and generate.HasField("top_logprobs"):
            compare(row, expected[row.position : row.position + row.token_ids.size], generate.top_logprobs)
            checked += row.token_ids.size
    assert checked == (len(output) if generate.HasField("top_logprobs") else 0)
    if not generate.include_draft_logprobs:
        assert not any(row.token_ids.size for row in got.drafts)
        return
    for row in got.drafts:
        if row.token_ids.size:
            # Drafted after the token before this row's first, from what describes the position before that token.
            last, state = output[row.position - 1], states[row.position - 1]
            compare(row, reference().draft_logprobs(state, last, row.token_ids.tolist()), generate.top_logprobs)


def compare(row: Row, expected: Array, top_k: int) -> None:
    """Compare a row's numbers with the logprobs of all tokens at its places; what is nearly equal may change places."""
    own = expected[np.arange(row.token_ids.size), row.token_ids]
    np.testing.assert_allclose(row.logprobs, own, atol=TOLERANCE, rtol=0)
    above = (expected > own[:, None] + TOLERANCE).sum(axis=-1)
    not_below = (expected >= own[:, None] - TOLERANCE).sum(axis=-1)
    assert (above < row.ranks).all()
    assert (row.ranks <= not_below).all()
    assert row.alternative_token_ids.shape == (row.token_ids.size, top_k)
    told = np.take_along_axis(expected, row.alternative_token_ids.astype(np.int64), axis=-1)
    np.testing.assert_allclose(row.alternative_logprobs, told, atol=TOLERANCE, rtol=0)
    best = -np.sort(-expected, axis=-1)[:, :top_k]
    np.testing.assert_allclose(row.alternative_logprobs, best, atol=TOLERANCE, rtol=0)


SUNNY = "The sun was shining. "
EXTRAS_TOLERANCE = 3e-4
GIVEN = [101, 32, 101, 0]
EVERYTHING = {"other_logprobs": True, "entropies": True, "token_ids": GIVEN, "mask_bound": 5}


def asking(key: int, scoring: dict[str, Any], **sampling: Any) -> Generate:  # noqa: ANN401
    generate = asked(key, SUNNY, seed=key, max_tokens=9, **sampling)
    generate.top_logprobs = 2
    generate.token_scoring.CopyFrom(TokenScoring(**scoring))
    return generate


def joined(rows: Sequence[Extras]) -> Extras:
    names = ("other_logprobs", "entropies", "given_logprobs", "mask_sizes", "mask_token_ids")
    whole: dict[str, Any] = {name: np.concatenate([getattr(row, name) for row in rows]) for name in names}
    return rows[0]._replace(**whole)


@pytest.mark.parametrize(("temperature", "top_k", "speculate"), [(0.7, 4, 2), (0.0, 0, 0), (1.0, 0, 2)])
def test_extras_are_those_of_a_plain_computation(temperature: float, top_k: int, speculate: int) -> None:
    requests = [
        asking(1, EVERYTHING, temperature=temperature, top_k=top_k),
        asking(2, {"entropies": True}, temperature=temperature, top_k=top_k),
        asking(3, {"mask_bound": 300, "token_ids": [7]}, temperature=temperature, top_k=top_k),
        asked(4, SUNNY, seed=4, max_tokens=9),
    ]
    run = paddle(requests, speculate=speculate).to_the_end()
    assert all(row.extras is None for row in run.got[4].rows)
    plain = reference()
    prompt = [256, *SUNNY.encode()]
    for generate in requests[:3]:
        got, scoring = run.got[generate.request_id], generate.token_scoring
        extras = joined([row.extras for row in got.rows if row.extras is not None])
        raw = plain.logprobs(plain.states([*prompt, *got.tokens]))[len(prompt) - 1 : -1].astype(np.float64)
        assert len(raw) == len(got.tokens) == 9
        allowed = np.full(raw.shape, fill_value=not top_k and bool(temperature))
        if top_k or not temperature:
            best = np.argsort(-raw, axis=1, kind="stable")[:, : top_k or 1]
            np.put_along_axis(allowed, best, values=True, axis=1)
        scaled = np.where(allowed, raw / (temperature or 1), -np.inf)
        drawn_from = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
        own = np.arange(9), got.tokens
        if scoring.other_logprobs:
            assert np.allclose(extras.other_logprobs, drawn_from[own], rtol=0, atol=EXTRAS_TOLERANCE)
        if scoring.entropies:
            assert np.allclose(extras.entropies, -(np.exp(raw) * raw).sum(axis=1), rtol=0, atol=EXTRAS_TOLERANCE)
        assert extras.given_token_ids.tolist() == list(scoring.token_ids)
        shown = raw[:, list(scoring.token_ids)]
        assert np.allclose(extras.given_logprobs, np.maximum(shown, -9999), rtol=0, atol=EXTRAS_TOLERANCE)
        if scoring.mask_bound:
            sizes = allowed.sum(axis=1)
            assert extras.mask_sizes.tolist() == sizes.tolist()
            for mask, size, line in zip(extras.masks(), sizes, allowed, strict=True):
                expected = None if size > scoring.mask_bound else np.flatnonzero(line).tolist()
                assert (None if mask is None else mask.tolist()) == expected
