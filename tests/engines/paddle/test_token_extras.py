"""What the paddle engine says of tokens beside logprobs: both distributions, entropies, given tokens and masks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.engines.paddle.needs import NEEDS_PADDLE
from tests.engines.paddle.reference import reference
from tests.engines.runs import asked, paddle
from tokenbus_contracts.extras import Extras
from tokenbus_contracts.generated.request_pb2 import Generate, TokenScoring

pytestmark = NEEDS_PADDLE
STORY = "The sun was shining. "
TOLERANCE = 3e-4
GIVEN = [101, 32, 101, 0]
EVERYTHING = {"other_logprobs": True, "entropies": True, "token_ids": GIVEN, "mask_bound": 5}


def asking(key: int, scoring: dict[str, Any], **sampling: Any) -> Generate:  # noqa: ANN401
    generate = asked(key, STORY, seed=key, max_tokens=9, **sampling)
    generate.top_logprobs = 2
    generate.token_scoring.CopyFrom(TokenScoring(**scoring))
    return generate


def joined(rows: Sequence[Extras]) -> Extras:
    """Return the extras of one request's rows, one after the other."""
    names = ("other_logprobs", "entropies", "given_logprobs", "mask_sizes", "mask_token_ids")
    whole: dict[str, Any] = {name: np.concatenate([getattr(row, name) for row in rows]) for name in names}
    return rows[0]._replace(**whole)


@pytest.mark.parametrize(("temperature", "top_k", "speculate"), [(0.7, 4, 2), (0.0, 0, 0), (1.0, 0, 2)])
def test_extras_are_those_of_a_plain_computation(temperature: float, top_k: int, speculate: int) -> None:
    requests = [
        asking(1, EVERYTHING, temperature=temperature, top_k=top_k),
        asking(2, {"entropies": True}, temperature=temperature, top_k=top_k),
        asking(3, {"mask_bound": 300, "token_ids": [7]}, temperature=temperature, top_k=top_k),
        asked(4, STORY, seed=4, max_tokens=9),
    ]
    run = paddle(requests, speculate=speculate).to_the_end()
    assert all(row.extras is None for row in run.got[4].rows)
    plain = reference()
    prompt = [256, *STORY.encode()]
    for generate in requests[:3]:
        got, scoring = run.got[generate.request_key], generate.token_scoring
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
            assert np.allclose(extras.other_logprobs, drawn_from[own], rtol=0, atol=TOLERANCE)
        if scoring.entropies:
            assert np.allclose(extras.entropies, -(np.exp(raw) * raw).sum(axis=1), rtol=0, atol=TOLERANCE)
        assert extras.given_token_ids.tolist() == list(scoring.token_ids)
        shown = raw[:, list(scoring.token_ids)]
        assert np.allclose(extras.given_logprobs, np.maximum(shown, -9999), rtol=0, atol=TOLERANCE)
        if scoring.mask_bound:
            sizes = allowed.sum(axis=1)
            assert extras.mask_sizes.tolist() == sizes.tolist()
            for mask, size, line in zip(extras.masks(), sizes, allowed, strict=True):
                expected = None if size > scoring.mask_bound else np.flatnonzero(line).tolist()
                assert (None if mask is None else mask.tolist()) == expected
