"""The results as they lie in memory are the message's own bytes."""

import numpy as np
import pytest

from tests.gpu_ops.logits import random
from tokenbus_contracts import BatchHeader, ContractError, LogprobBatch, RowStatus, ValueKind, decode, encode
from tokenbus_contracts.generated import logprob_batch_pb2 as pb
from tokenbus_gpu_ops import token_logprobs

HEADER = BatchHeader("worker-0", epoch=1, sequence=1, step=1, step_rows=3)
COMPUTED = ("token_ids", "logprobs", "ranks", "alternative_token_ids", "alternative_logprobs")


def _row_columns(rows: int) -> dict[str, object]:
    return {
        "request_ids": np.arange(1, rows + 1), "batch_indices": np.arange(rows), "positions": np.zeros(rows, int),
        "statuses": [RowStatus.ACTIVE] * rows, "draft_token_counts": [0] * rows, "proposal_counts": [0] * rows,
    }  # fmt: skip


@pytest.mark.parametrize(("rows", "top_k"), [(1, 0), (3, 5), (30, 0), (31, 1), (33, 127), (1024, 4)])
def test_the_generated_classes_read_the_body(rows: int, top_k: int) -> None:
    rng = np.random.default_rng(rows)
    result = token_logprobs(random(rng, rows, 200), rng.integers(0, 200, rows), top_k)
    message = pb.LogprobBatch.FromString(bytes(result.body))
    for name in COMPUTED:
        assert list(getattr(message, name)) == getattr(result, name).tolist(), name
    assert message.SerializeToString() == bytes(result.body)


def test_a_message_is_its_rows_and_the_body() -> None:
    rng = np.random.default_rng(2)
    result = token_logprobs(random(rng, 3, 200), [1, 2, 3], [2, 0, 7])
    batch = result.batch(HEADER, **_row_columns(3))  # type: ignore[arg-type]
    message = encode(batch)
    assert message.endswith(bytes(result.body))
    assert decode(message) == batch
    assert batch.header.value_kind == ValueKind.RAW_LOGPROBS


def test_the_columns_are_taken_as_they_are() -> None:
    result = token_logprobs(random(np.random.default_rng(3), 3, 200), [1, 2, 3], 2)
    batch = LogprobBatch(
        HEADER._replace(value_kind=result.value_kind),
        **_row_columns(3),  # type: ignore[arg-type]
        **result.columns,
    )
    body = np.frombuffer(result.body, np.uint8)
    for name in COMPUTED:
        assert np.shares_memory(getattr(batch, name), body), name


def test_a_row_with_a_fault_cannot_be_sent() -> None:
    """A caller that overlooks a fault is stopped by the codec: its values are NaN and its rank is none (case 24)."""
    logits = random(np.random.default_rng(4), 3, 200)
    logits[1, 7] = np.nan
    batch = token_logprobs(logits, [1, 2, 3], 2).batch(HEADER, **_row_columns(3))  # type: ignore[arg-type]
    with pytest.raises(ContractError, match=r"ranks\[1\]: at least 1, got 0"):
        encode(batch)
