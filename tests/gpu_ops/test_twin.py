"""The CPU twin against float64, over everything that logits can be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gpu_ops.logits import random
from tests.gpu_ops.reference import assert_right
from tokenbus_contracts import ValueKind
from tokenbus_gpu_ops import FaultReason, token_logprobs


def test_rows_of_different_top_k_do_not_touch_each_other() -> None:
    """Each row gets as many alternatives as it wants, and the same ones whatever its neighbours want (case 15)."""
    rng = np.random.default_rng(9)
    logits = random(rng, 6, 3000)
    ids = rng.integers(0, 3000, 6)
    top_ks = [0, 1, 127, 0, 20, 5]
    result = token_logprobs(logits, ids, top_ks)
    assert_right(result, logits, ids, top_ks)
    for row, top_k in enumerate(top_ks):
        alone = token_logprobs(logits[row : row + 1], ids[row : row + 1], top_k)
        at = sum(top_ks[:row])
        assert alone.alternative_token_ids.tolist() == result.alternative_token_ids[at : at + top_k].tolist()
        assert alone.logprobs.tobytes() == result.logprobs[row : row + 1].tobytes()


@given(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1e-8, 2e-8, 1.0]), min_size=1, max_size=60), st.data())
def test_the_answer_for_k_begins_with_the_answer_for_fewer(values: list[float], data: st.DataObject) -> None:
    """However logits tie, before or after rounding, the answer for k is the first of that for more (case 33)."""
    logits = np.array([values], np.float32)
    more = data.draw(st.integers(1, len(values)))
    fewer = data.draw(st.integers(0, more))
    long = token_logprobs(logits, [0], more)
    short = token_logprobs(logits, [0], fewer)
    assert short.alternative_token_ids.tolist() == long.alternative_token_ids[:fewer].tolist()
    assert_right(long, logits, [0], more)


def test_nan_is_reported_and_its_neighbours_are_right() -> None:
    """A NaN, an infinity or a row of masks is named with its reason, and the rows beside it are right (case 24)."""
    rng = np.random.default_rng(10)
    logits = random(rng, 6, 1000)
    ids = rng.integers(0, 1000, 6)
    good = logits.copy()
    logits[1, 500] = np.nan
    logits[2, 3] = np.inf
    logits[4] = -np.inf
    result = token_logprobs(logits, ids, 4)
    assert [(fault.row, fault.token, fault.reason) for fault in result.faults] == [
        (1, 1, FaultReason.NOT_A_NUMBER),
        (2, 2, FaultReason.INFINITE),
        (4, 4, FaultReason.ALL_MASKED),
    ]
    assert np.isnan(result.logprobs[[1, 2, 4]]).all()
    assert result.ranks[[1, 2, 4]].tolist() == [0, 0, 0]
    right = token_logprobs(good, ids, 4)
    fine = [0, 3, 5]
    assert result.logprobs[fine].tolist() == right.logprobs[fine].tolist()
    table = result.alternative_token_ids.reshape(6, 4)
    assert table[fine].tolist() == right.alternative_token_ids.reshape(6, 4)[fine].tolist()


@pytest.mark.parametrize("kind", [ValueKind.RAW_LOGITS, ValueKind.PROCESSED_LOGITS])
def test_logits_can_be_wanted_instead_of_logprobs(kind: ValueKind) -> None:
    rng = np.random.default_rng(11)
    logits = random(rng, 2, 700)
    logits[0, 5] = -np.inf
    result = token_logprobs(logits, [5, 6], 6, value_kind=kind)
    assert_right(result, logits, [5, 6], 6, as_logits=True)
    assert result.logprobs[0] == np.float32(-9999.0)
    assert result.value_kind is kind


def test_rows_may_lie_anywhere() -> None:
    rng = np.random.default_rng(12)
    store = random(rng, 8, 500)
    for logits in (store[::2, :300], store[::-1], np.broadcast_to(store[0], (4, 500)), store[:, 3:400]):
        ids = rng.integers(0, logits.shape[1], len(logits))
        assert_right(token_logprobs(logits, ids, 3), logits, ids, 3)
