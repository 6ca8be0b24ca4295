"""From `token_logprobs`' columns to a step's, in the place of vLLM's arrays: drafts that are cut off, rows that ask."""

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engines.vllm.test_columns import Row, batch_of, made
from tokenbus.engines.vllm.configuration import check_token_scores
from tokenbus.engines.vllm.token_scores import token_scores
from tokenbus_contracts import RowStatus
from tokenbus_gpu_ops import token_logprobs

VOCABULARY = 64


@pytest.mark.parametrize("seed", range(5))
def test_rows_have_what_they_asked_for(seed: int) -> None:
    """Rows of any number of tokens that ask for anything: what a call for each row alone says of its tokens."""
    chance = np.random.default_rng(seed)
    requests, each, top_k = 9, 3, 4
    own, other = chance.normal(size=(2, requests * each, VOCABULARY)).astype(np.float32)
    other[chance.random(other.shape) < 0.8] = -np.inf
    other[:, 0] = 1.0
    tokens = chance.integers(0, VOCABULARY, requests * each)
    bounds = chance.choice([0, 0, 10, 40], requests)
    given = [chance.permutation(VOCABULARY)[:size].tolist() for size in chance.choice([0, 0, 1, 5], requests)]
    asked: dict[str, Any] = {
        "other_logprobs": chance.random(requests) < 0.5,
        "entropies": chance.random(requests) < 0.5,
        "mask_bounds": bounds,
    }
    found = token_logprobs(
        own,
        tokens,
        top_k,
        token_counts=np.full(requests, each),
        other_logits=other,
        given_token_ids=np.array([token_id for ids in given for token_id in ids], np.int64),
        given_counts=[len(ids) for ids in given],
        **asked,
    )
    counts = chance.integers(0, each + 1, requests)
    top_ks = [None if k > top_k else int(k) for k in chance.integers(0, top_k + 3, requests)]
    kept = (np.arange(each) < counts[:, None]).reshape(-1)
    starts = (np.cumsum(counts) - counts).tolist()
    scores = pickle.loads(pickle.dumps(token_scores(found, kept, starts)))  # noqa: S301 - as between vLLM's processes
    rows = []
    for place, count in enumerate(counts.tolist()):
        status = RowStatus.ACTIVE if count else RowStatus.IDLE
        rows.append(Row(place + 1, 2, tokens[place * each :][:count].tolist(), top_ks[place], place, status))
    for place, row in enumerate(batch_of(rows, scores).rows()):
        lines = slice(place * each, place * each + int(counts[place]))
        is_asked = bool(asked["other_logprobs"][place] or asked["entropies"][place] or bounds[place] or given[place])
        if top_ks[place] is None or not counts[place]:
            assert (row.logprobs.size, row.extras) == (0, None)
            continue
        alone = token_logprobs(
            own[lines],
            tokens[lines],
            top_ks[place] or 0,
            token_counts=[counts[place]],
            other_logits=other[lines],
            given_token_ids=np.array(given[place], np.int64),
            **{name: values[place : place + 1] for name, values in asked.items()},
        )
        assert row.logprobs.tolist() == alone.logprobs.tolist()
        assert row.ranks.tolist() == alone.ranks.tolist()
        assert row.alternative_token_ids.reshape(-1).tolist() == alone.alternative_token_ids.tolist()
        assert (row.extras is not None) == is_asked
        if row.extras is None:
            continue
        assert row.extras.mask_bound == bounds[place]
        for name in ("entropies", "given_token_ids", "mask_sizes", "mask_token_ids"):
            assert getattr(row.extras, name).tolist() == getattr(alone, name).tolist(), name
        assert row.extras.other_logprobs.tolist() == np.maximum(alone.other_logprobs, -9999).tolist()
        assert row.extras.given_logprobs.reshape(-1).tolist() == alone.given_logprobs.tolist()


def test_rows_that_ask_for_nothing_have_no_columns() -> None:
    logits, tokens = np.zeros((2, VOCABULARY), np.float32), np.array([3, 5])
    scores = token_scores(token_logprobs(logits, tokens, 1))
    assert scores.extras is None
    assert made([Row(1, 0, [3], 1), Row(2, 0, [5], 1, 1)], scores).extras is None


@pytest.mark.parametrize(
    ("mode", "runner", "line"),
    [
        ("raw_logits", "V1", "--logprobs-mode raw_logprobs or processed_logprobs, got raw_logits"),
        ("raw_logprobs", "V2", "vLLM's V1 model runner, got V2, as VLLM_USE_V2_MODEL_RUNNER or the model says"),
    ],
)
def test_samplers_that_cannot_be_ours_are_refused(mode: str, runner: str, line: str) -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(logprobs_mode=mode), use_v2_model_runner=runner == "V2")
    with pytest.raises(ValueError, match=f"^--token-scores: {line}$"):
        check_token_scores(config)
