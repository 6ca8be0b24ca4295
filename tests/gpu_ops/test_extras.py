"""What a call returns beside values, ranks and alternatives, by the CPU twin: against float64, and what is refused."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gpu_ops.logits import DTYPES, FAR_KINDS, KINDS, masked, random, rounded
from tests.gpu_ops.producer import as_if_on_gpu, given_as
from tests.gpu_ops.reference import Wanted, assert_extras, assert_right, entropy_of
from tokenbus_contracts import ContractError, ValueKind
from tokenbus_gpu_ops import FaultReason, token_logprobs
from tokenbus_gpu_ops.columns import EXTRA_COLUMNS

RAW, PROCESSED = ValueKind.RAW_LOGPROBS, ValueKind.PROCESSED_LOGPROBS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary", [1, 2, 63, 64, 65, 4097, pytest.param(262_144, marks=pytest.mark.nightly)])
def test_every_kind_of_logits(kind: str, dtype: str, vocabulary: int) -> None:
    """Raw logits of every kind beside masked ones: all that can be asked for at once is float64's (case 33)."""
    rng = np.random.default_rng(vocabulary)
    rows = 7
    raw, processed = (rounded(KINDS[each](rng, rows, vocabulary), dtype) for each in (kind, "masked"))
    ids, wanted = rng.integers(0, vocabulary, rows), Wanted.drawn(rng, rows, vocabulary)
    for first, second, value_kind, k in ((raw, processed, RAW, 100), (processed, raw, PROCESSED, 5)):
        top_k = min(k, vocabulary)
        asked = wanted.arguments | {"other_logits": given_as(dtype, second), "value_kind": value_kind}
        result = token_logprobs(given_as(dtype, first), ids, top_k, **asked)
        assert_right(result, first, ids, top_k)
        assert_extras(result, first, ids, wanted, second, processed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FAR_KINDS)
def test_logits_at_the_end_of_the_floats(kind: str, dtype: str) -> None:
    rng = np.random.default_rng(2)
    logits = rounded(FAR_KINDS[kind](rng, 3, 5000), dtype)
    logits[1, :4990] = -np.inf
    logits[2, [5, 6]] = logits[2].max()
    found = token_logprobs(given_as(dtype, logits), [0, 4999, 5], 9, entropies=True, mask_bounds=10)
    assert_right(found, logits, [0, 4999, 5], 9)
    np.testing.assert_allclose(found.entropies, [entropy_of(row.astype(np.float64)) for row in logits], atol=1e-5)
    assert found.mask_sizes.tolist() == [5000, 10, 5000]
    assert found.mask_token_ids.tolist() == list(range(4990, 5000))


def test_a_vocabulary_of_several_blocks() -> None:
    rng, ids = np.random.default_rng(3), [0, 600_000]
    logits = random(rng, 2, 600_001)
    logits[1] = np.sort(logits[1])
    wanted = Wanted([1, 1], [False] * 2, [True] * 2, [[600_000, 0, 0], []], [1, 1024])
    result = token_logprobs(logits, ids, 50, **wanted.arguments)
    assert_right(result, logits, ids, 50)
    assert_extras(result, logits, ids, wanted, logits, logits)


@given(st.lists(st.floats(-40, 40, width=32) | st.just(-np.inf), min_size=1, max_size=300), st.integers(1, 300))
def test_any_logits(values: list[float], bound: int) -> None:
    """Whatever the logits, the entropy is float64's, and a mask has all ids or says that it has more than its bound."""
    logits = np.array([[*values, 0.0]], np.float32)
    wanted = Wanted([1], [True], [True], [list(range(min(128, len(values))))], [bound])
    result = token_logprobs(logits, [len(values)], other_logits=logits, **wanted.arguments)
    assert_extras(result, logits, [len(values)], wanted, logits, logits)


def test_one_argument_for_all_requests() -> None:
    rng = np.random.default_rng(4)
    logits, other, ids = random(rng, 4, 300), masked(rng, 4, 300), [1, 2, 3, 4]
    result = token_logprobs(logits, ids, other_logits=other, entropies=True, given_token_ids=[7, 7, 9], mask_bounds=40)
    wanted = Wanted([1] * 4, [True] * 4, [True] * 4, [[7, 7, 9]] * 4, [40] * 4)
    assert_extras(result, logits, ids, wanted, other, other)


def test_nothing_asked_is_nothing_returned() -> None:
    rng = np.random.default_rng(5)
    logits = random(rng, 4, 300)
    plain = token_logprobs(logits, [1, 2, 3, 4], 2)
    for arguments in (
        {},
        {"entropies": [False] * 4},
        {"mask_bounds": [0] * 4, "given_token_ids": []},
        {"other_logits": logits, "other_logprobs": False},
        {"entropies": True, "mask_bounds": 5, "given_token_ids": [1], "other_logits": logits, "scored": [False] * 4},
    ):
        result = token_logprobs(logits, [1, 2, 3, 4], 2, **arguments)
        assert all(getattr(result, name).size == 0 for name in EXTRA_COLUMNS)
        assert result.extra_columns == {}
        assert "scored" in arguments or bytes(result.body) == bytes(plain.body)


def test_requests_that_are_not_scored_get_nothing() -> None:
    rng = np.random.default_rng(6)
    logits, ids = random(rng, 6, 300), np.arange(6)
    scored, counts = [True, False, True], [2, 3, 1]
    asked: dict[str, Any] = {"entropies": True, "mask_bounds": 300, "given_counts": [1, 2, 0]}
    result = token_logprobs(logits, ids, token_counts=counts, scored=scored, given_token_ids=[5, 6, 7], **asked)
    kept = [0, 1, 5]
    wanted = Wanted([2, 1], [False] * 2, [True] * 2, [[5], []], [300] * 2)
    alone = token_logprobs(logits[kept], ids[kept], **wanted.arguments)
    assert_extras(alone, logits[kept], ids[kept], wanted, logits[kept], logits[kept])
    assert result.extras.tolist() == [2, 0, 2]
    assert result.given_counts.tolist() == [1, 0, 0]
    assert result.mask_bounds.tolist() == [300, 0, 300]
    for name in EXTRA_COLUMNS[3:]:
        assert getattr(result, name).tolist() == getattr(alone, name).tolist(), name


def test_other_values_are_of_the_same_kind() -> None:
    """Where logits are wanted instead of logprobs, so they are of the second tensor and of given ids."""
    rng = np.random.default_rng(7)
    logits, other = random(rng, 2, 300), masked(rng, 2, 300)
    wanted = Wanted([1, 1], [True] * 2, [True] * 2, [[3, 4], [5]], [0, 0])
    result = token_logprobs(logits, [1, 2], other_logits=other, value_kind=ValueKind.RAW_LOGITS, **wanted.arguments)
    assert_extras(result, logits, [1, 2], wanted, other, other, as_logits=True)


def test_a_fault_in_the_second_tensor_is_its_own() -> None:
    """It is named as of the other logits, its value is no number, and what is of the first tensor is right."""
    rng = np.random.default_rng(8)
    logits, other = random(rng, 4, 300), random(rng, 4, 300)
    other[1, 7], other[2], logits[3, 5] = np.nan, -np.inf, np.inf
    asked: dict[str, Any] = {"entropies": True, "given_token_ids": [1], "mask_bounds": 300}
    result = token_logprobs(logits, [0] * 4, 1, other_logits=other, **asked)
    assert [(fault.token, fault.reason, fault.in_other_logits) for fault in result.faults] == [
        (3, FaultReason.INFINITE, False),
        (1, FaultReason.NOT_A_NUMBER, True),
        (2, FaultReason.ALL_MASKED, True),
    ]
    assert_right(token_logprobs(logits[:3], [0] * 3, 1), logits[:3], [0] * 3, 1)
    assert np.isnan(result.other_logprobs).tolist() == [False, True, True, False]
    for name in ("entropies", "given_logprobs", "logprobs"):
        assert np.isnan(getattr(result, name)).tolist() == [False, False, False, True], name
    assert result.mask_sizes.tolist() == [300, 0, 0, 300]
    assert result.mask_token_ids.size == 600


BAD: list[tuple[dict[str, Any], str]] = [
    ({"other_logits": np.zeros((4, 299), np.float32)}, "other_logits: like logits: shape (4, 300), float32, on the CPU, got shape (4, 299), float32, on the CPU"),  # noqa: E501
    ({"other_logits": np.zeros((4, 300), np.float16)}, "other_logits: like logits: shape (4, 300), float32, on the CPU, got shape (4, 300), float16, on the CPU"),  # noqa: E501
    ({"other_logits": as_if_on_gpu(np.zeros((4, 300), np.float32))}, "other_logits: like logits: shape (4, 300), float32, on the CPU, got shape (4, 300), float32, on GPU 0"),  # noqa: E501
    ({"other_logits": 7}, "other_logits: an array of numpy, paddle, torch, cupy or another DLPack library, got int"),
    ({"other_logprobs": [False, True, False, False]}, "other_logprobs: other_logits with them, got none"),
    ({"entropies": [1] * 4}, "entropies: True or False for each request, got int64"),
    ({"entropies": [True]}, "entropies: 4 elements, one for each request, got 1"),
    ({"mask_bounds": 1025}, "mask_bounds: at most 1024, got 1025"),
    ({"mask_bounds": [0, -1, 0, 0]}, "mask_bounds[1]: at least 0, got -1"),
    ({"given_token_ids": [299, 300]}, "given_token_ids[1]: at most 299, got 300"),
    ({"given_token_ids": [1] * 129}, "given_token_ids: at most 128 elements, got 129"),
    ({"given_counts": [0, 129, 0, 0], "given_token_ids": [1] * 129}, "given_counts[1]: at most 128, got 129"),
    ({"given_counts": [0, 1, 1, 0], "given_token_ids": [1, 2, 3]}, "given_token_ids: 2 elements, the sum of given_counts, got 3"),  # noqa: E501
    ({"given_counts": [0] * 4}, "given_counts: given_token_ids with them, got none"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_refused_with_field_limit_and_value(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError) as caught:
        token_logprobs(random(np.random.default_rng(9), 4, 300), [0] * 4, **arguments)
    assert str(caught.value) == message
