"""Requests with several tokens: which logits are whose, and what is refused."""

from typing import Any

import numpy as np
import pytest

from tests.gpu_ops.logits import random
from tests.gpu_ops.reference import assert_right
from tokenbus_contracts import ContractError, Scoring, ValueKind
from tokenbus_gpu_ops import token_logprobs

LOGITS = random(np.random.default_rng(1), 9, 400)
COUNTS = [2, 0, 1, 3]
OFFSETS = [0, 3, 4, 6]
"""Of four requests with 3, 1, 2 and 3 rows of logits; what is not accepted is not looked at."""
ROWS = [0, 1, 4, 6, 7, 8]
IDS = [10, 11, 40, 60, 61, 62]


@pytest.mark.parametrize("offsets", [OFFSETS, [*OFFSETS, 9]])
@pytest.mark.parametrize("layout", ["rows", "tokens", "requests"])
def test_accepted_tokens_are_found_by_count_and_offset(offsets: list[int], layout: str) -> None:
    """Ids by row, by token or by request and token: each layout gives the accepted tokens (cases 5, 11)."""
    by_row = np.full(9, 399)
    by_row[ROWS] = IDS
    by_request = np.array([[10, 11, 399], [399, 399, 399], [40, 399, 399], [60, 61, 62]])
    ids = {"rows": by_row, "tokens": np.array(IDS), "requests": by_request}[layout]
    result = token_logprobs(LOGITS, ids, [2, 5, 0, 1], token_counts=COUNTS, offsets=offsets)
    assert_right(result, LOGITS[ROWS], IDS, [2, 2, 0, 1, 1, 1])
    assert result.token_counts.tolist() == COUNTS
    assert result.top_ks.tolist() == [2, 5, 0, 1]


def test_rejected_positions_are_not_looked_at() -> None:
    logits = LOGITS.copy()
    logits[[2, 3, 5]] = np.nan
    result = token_logprobs(logits, IDS, 1, token_counts=COUNTS, offsets=OFFSETS)
    assert_right(result, LOGITS[ROWS], IDS, 1)


def test_requests_that_want_nothing_get_their_ids_alone() -> None:
    """Whether a request is scored and how many alternatives it wants are two arguments, never one number (case 29)."""
    scored = [True, True, False, True]
    result = token_logprobs(LOGITS, IDS, 2, token_counts=COUNTS, offsets=OFFSETS, scored=scored)
    assert result.token_ids.tolist() == IDS
    assert result.logprobs.size == result.ranks.size == 5
    assert result.scorings.tolist() == [Scoring.FULL, Scoring.FULL, Scoring.NONE, Scoring.FULL]
    assert result.top_ks.tolist() == [2, 2, 0, 2]
    everything = token_logprobs(LOGITS, IDS, 2, token_counts=COUNTS, offsets=OFFSETS)
    kept = [0, 1, 3, 4, 5]
    assert result.logprobs.tolist() == everything.logprobs[kept].tolist()
    table = everything.alternative_token_ids.reshape(6, 2)
    assert result.alternative_token_ids.reshape(5, 2).tolist() == table[kept].tolist()


def test_counts_alone_are_enough_where_nothing_was_rejected() -> None:
    result = token_logprobs(LOGITS, list(range(9)), 1, token_counts=[4, 0, 5])
    assert_right(result, LOGITS, range(9), 1)


def test_faults_name_request_token_and_row() -> None:
    logits = LOGITS.copy()
    logits[7, 3] = np.nan
    (fault,) = token_logprobs(logits, IDS, 1, token_counts=COUNTS, offsets=OFFSETS).faults
    assert (fault.row, fault.token, fault.logits_row) == (3, 4, 7)


def test_no_rows_and_no_tokens_are_no_fault() -> None:
    for result in (
        token_logprobs(np.zeros((0, 400), np.float32), [], 5),
        token_logprobs(LOGITS, [], 5, token_counts=[0, 0], offsets=[0, 4]),
    ):
        assert result.token_ids.size == result.logprobs.size == result.alternative_token_ids.size == 0
        assert result.faults == ()
        assert bytes(result.body) == b""


BAD: list[tuple[dict[str, Any], str]] = [
    ({"logits": LOGITS.astype(np.float64)}, "logits: one of bfloat16, float16, float32, got float64"),
    ({"logits": LOGITS[0]}, "logits: two dimensions, rows and vocabulary, got shape (400,)"),
    ({"logits": np.asfortranarray(LOGITS)}, "logits: rows whose logits follow one another (a stride of 1), got a stride of 9"),  # noqa: E501
    ({"logits": "logits"}, "logits: an array of numpy, paddle, torch, cupy or another DLPack library, got str"),
    ({"logits": np.zeros((9, 0), np.float32)}, "logits.vocabulary: at least 1, got 0"),
    ({"token_ids": [1, 2]}, "token_ids: 9 elements, one for each row of logits, or 9, one for each token, got 2"),
    ({"token_ids": [0] * 8 + [400]}, "token_ids[8]: at most 399, got 400"),
    ({"token_ids": [0, -1] + [0] * 7}, "token_ids[1]: at least 0, got -1"),
    ({"token_ids": np.zeros(9)}, "token_ids: whole numbers (int32, int64, uint32, uint64, int16, uint16, int8, uint8), got float64"),  # noqa: E501
    ({"token_ids": np.zeros((2, 3), int), "token_counts": [4, 5]}, "token_ids: at least shape (2, 5), requests and their tokens, got shape (2, 3)"),  # noqa: E501
    ({"top_k": 128}, "top_k: at most 127, got 128"),
    ({"top_k": -1}, "top_k: at least 0, got -1"),
    ({"top_k": [0] * 8 + [200]}, "top_k[8]: at most 127, got 200"),
    ({"top_k": [1, 2]}, "top_k: 9 elements, one for each request, got 2"),
    ({"logits": LOGITS[:, :3], "top_k": 4}, "top_k[0]: at most 3, the size of the vocabulary, got 4"),
    ({"top_k": [0.5] * 9}, "top_k: whole numbers, got float64"),
    ({"token_counts": [9, 1]}, "token_counts: 9, the rows of logits, where there are no offsets, got a sum of 10"),
    ({"token_counts": [2, 4, 1], "offsets": [0, 3, 6]}, "token_counts[1]: at most 3, got 4"),
    ({"token_counts": [2, 4], "offsets": [0, 6]}, "token_counts[1]: at most 3, got 4"),
    ({"token_counts": [17]}, "token_counts[0]: at most 16, got 17"),
    ({"token_counts": [10, -1]}, "token_counts[1]: at least 0, got -1"),
    ({"token_counts": [2, 4], "offsets": [0]}, "offsets: 2 or 3 elements, one for each request and the end, got 1"),
    ({"token_counts": [2, 0], "offsets": [0, 10]}, "offsets[1]: at most 9, got 10"),
    ({"offsets": [0]}, "offsets: token_counts with them, got none"),
    ({"scored": [1] * 9}, "scored: True or False for each request, got int64"),
    ({"scored": [True]}, "scored: 9 elements, one for each request, got 1"),
    ({"value_kind": ValueKind.UNSPECIFIED}, ("value_kind: one of RAW_LOGPROBS, PROCESSED_LOGPROBS, RAW_LOGITS, PROCESSED_LOGITS, got <ValueKind.UNSPECIFIED: 0>")),  # noqa: E501
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_refused_with_field_limit_and_value(changes: dict[str, Any], message: str) -> None:
    """What does not fit is refused in one line before anything is computed or written (case 30)."""
    arguments: dict[str, Any] = {"logits": LOGITS, "token_ids": [0] * 9, "top_k": 0} | changes
    logits, token_ids, top_k = (arguments.pop(name) for name in ("logits", "token_ids", "top_k"))
    with pytest.raises(ContractError) as caught:
        token_logprobs(logits, token_ids, top_k, **arguments)
    assert str(caught.value) == message
