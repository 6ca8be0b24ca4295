"""The public names, used as a caller uses them: this file is what mypy holds the API's types against."""

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import (
    BatchHeader,
    BatchKind,
    ContractError,
    Limits,
    LogprobBatch,
    Row,
    RowStatus,
    Rule,
    Scoring,
    SpeculativeMethod,
    StepPhase,
    ValueKind,
    decode,
    encode,
)


def _batch() -> LogprobBatch:
    header: BatchHeader = BatchHeader(
        worker_id="worker-0",
        epoch=1,
        sequence=1,
        step=1,
        step_rows=2,
        kind=BatchKind.TARGET,
        phase=StepPhase.DECODE,
        method=SpeculativeMethod.MTP,
        value_kind=ValueKind.RAW_LOGPROBS,
    )
    ids: npt.NDArray[np.uint32] = np.array([3, 1, 4], np.uint32)
    return LogprobBatch(
        header,
        request_keys=[7, 9],
        batch_indices=(1, 0),
        positions=np.array([5, 0]),
        statuses=[RowStatus.ACTIVE, RowStatus.FINISHED_STOP],
        token_counts=[2, 1],
        draft_token_counts=[2, 0],
        proposal_counts=[0, 0],
        scorings=[Scoring.FULL, Scoring.SHED],
        top_ks=[0, 0],
        token_ids=ids,
        logprobs=[-0.5, -1.0, -2.0],
        ranks=[1, 2, 3],
    )


def test_public_names_are_typed_and_work() -> None:
    """Build, encode, decode, reorder and read a batch with nothing but the public names."""
    batch = _batch()
    data: bytes = encode(batch)
    read: LogprobBatch = decode(data, limits=Limits.default())
    ordered: LogprobBatch = read.in_batch_order()
    rows: list[Row] = list(ordered.rows())
    keys: list[int] = [row.key for row in rows]
    assert keys == [9, 7]
    last: npt.NDArray[np.uint32] = rows[1].token_ids
    assert last.tolist() == [3, 1]
    columns: dict[str, npt.NDArray[np.generic]] = dict(ordered.select([0]).columns)
    assert columns["token_ids"].tolist() == [4]
    assert decode(bytearray(data)) == decode(memoryview(data)) == batch


def test_error_has_its_parts() -> None:
    """A ContractError carries the field, the limit, the value and the rule, and is a ValueError."""
    error = ContractError("token_counts[3]", 8, 9, rule=Rule.MAX)
    field: str = error.field
    limit: object = error.limit
    actual: object = error.actual
    rule: Rule = error.rule
    assert (field, limit, actual, rule) == ("token_counts[3]", 8, 9, "max")
    assert str(error) == "token_counts[3]: at most 8, got 9"
    assert isinstance(error, ValueError)
