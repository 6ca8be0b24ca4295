"""The oracle itself, held against numbers from FastDeploy's sources."""

import numpy as np
import pytest

from tests.engines.fastdeploy import kernel
from tests.engines.fastdeploy.bus import stained
from tests.engines.fastdeploy.engine import TOPK, Steps, whole
from tests.engines.fastdeploy.theirs import FLAT_FORM, FORMS, GETS, PACKS_FLAG, PACKS_SLOTS
from tests.engines.fastdeploy.undefined import Array, Given

IDS = 3 + 512


def two_slots(sampled: Array, columns: int = 2) -> Given:
    """Return arguments of the speculative ops with scores: slots of one and two tokens, whose ids name their line."""
    lines = 10 * np.arange(3)[:, None] + np.arange(columns)
    scores = {"logprob_scores": -lines.astype(np.float32), "logprob_ranks": np.arange(3)}
    return whole(TOPK, 1, 2) | {"sampled_token_ids": sampled, "logprob_token_ids": lines, **scores}


def got(form: str, op: str, given: Given) -> list[Array]:
    outputs = stained(GETS[op])
    with kernel.queue(form) as queue:
        queue.save(op, given)
        queue.get(outputs)
    return [output.reshape(-1) for output in outputs]


def slot(tokens: Array, number: int) -> Array:
    found: Array = tokens[IDS:].reshape(512, 6, 21)[number]
    return found


@pytest.mark.parametrize("form", [FLAT_FORM, *FORMS])
def test_sampled_tokens_are_read_in_lines_since_5927(form: str) -> None:
    """Before it slot i's token j is at its offset + j of a flat tensor, since then in line i, column j."""
    sampled = np.array([101, 201, 202]) if form == FLAT_FORM else np.array([[101, 7], [201, 202]])
    tokens, _, ranks = got(form, TOPK, two_slots(sampled))
    assert slot(tokens, 0)[:1, 0].tolist() == [101]
    assert slot(tokens, 1)[:2, 0].tolist() == [201, 202]
    assert ranks.reshape(512, 6)[1, :2].tolist() == [1, 2]


@pytest.mark.parametrize("form", FORMS)
def test_columns_are_said_and_strided_by_since_7860_and_7883(form: str) -> None:
    tokens, scores, _ = got(form, TOPK, two_slots(np.array([[101, 7], [201, 202]]), 21))
    assert slot(tokens, 1)[1, 1:3].tolist() == [21, 22]
    assert scores.reshape(512, 6, 21)[1, 1, :3].tolist() == [-20.0, -21.0, -22.0]
    assert tokens[:3].tolist() == [1, 3 | 21 << 8 if form in PACKS_FLAG else 3, 2]
    tokens, scores, _ = got(
        form, "save_output_topk", Steps(1).drawn("save_output_topk", 2, 3) | {"preempted_idx": np.array([1, 0])}
    )
    packs = form in PACKS_SLOTS
    assert tokens[1] == (2 | 3 << 16 if packs else 2)
    stride = 3 if packs else 21
    assert tokens[2 : 2 + stride].tolist() == [-9] * stride
    untouched = stained("get_output_topk")[0].reshape(-1)[0]
    assert (tokens[2 + 2 * stride :] == untouched).all()


@pytest.mark.parametrize("op", GETS)
def test_structs_have_the_sizes_that_are_sent(op: str) -> None:
    sizes = {"speculate_get_output_topk": 530_448, "get_output_topk": 88_072, "speculate_get_output": 7176}
    with kernel.queue() as queue:
        queue.save(op, Steps(1).drawn(op, 1, 21))
        assert queue.ops.get(GETS[op], stained(GETS[op])) == sizes.get(GETS[op], 2056)
