"""encode: what a caller passes wrongly is refused like what arrives wrongly, and nothing is half written."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.contracts.other_encodings import record
from tokenbus_contracts import (
    BatchHeader,
    ContractError,
    Limits,
    LogprobBatch,
    RowStatus,
    Rule,
    Scoring,
    ValueKind,
    decode,
    encode,
)
from tokenbus_contracts.schema import COLUMNS

HEADER = BatchHeader("worker-0", epoch=1, sequence=1, step=1, step_rows=2, value_kind=ValueKind.RAW_LOGPROBS)
TWO_ROWS: dict[str, Any] = {
    "request_ids": [5, 6], "batch_indices": [0, 1], "positions": [0, 0], "statuses": [RowStatus.ACTIVE] * 2,
    "token_counts": [2, 1], "draft_token_counts": [1, 0], "proposal_counts": [0, 0], "scorings": [Scoring.FULL] * 2,
    "top_ks": [1, 0], "token_ids": [3, 4, 0], "logprobs": [-0.5, -1.5, 0.0], "ranks": [1, 2, 1],
    "alternative_token_ids": [3, 9], "alternative_logprobs": [-0.5, -0.75],
}  # fmt: skip


def batch(**changed: Any) -> LogprobBatch:  # noqa: ANN401 - a test passes whatever a caller might
    return LogprobBatch(HEADER, **(TWO_ROWS | changed))


def refusal(**changed: Any) -> ContractError:  # noqa: ANN401
    with pytest.raises(ContractError) as refused:
        encode(batch(**changed))
    return refused.value


def test_lists_and_arrays_encode_alike() -> None:
    plain = encode(batch())
    arrays = {name: np.array(values) for name, values in TWO_ROWS.items()}
    assert encode(LogprobBatch(HEADER, **arrays)) == plain
    strided = {name: np.repeat(values, 2)[::2] for name, values in arrays.items()}
    assert encode(LogprobBatch(HEADER, **strided)) == plain
    swapped = {name: values.astype(values.dtype.newbyteorder(">")) for name, values in arrays.items()}
    assert encode(LogprobBatch(HEADER, **swapped)) == plain
    fitting = decode(plain).columns
    backwards = {name: np.ascontiguousarray(values[::-1])[::-1] for name, values in fitting.items()}
    assert encode(LogprobBatch(HEADER, **backwards)) == plain


@pytest.mark.parametrize("name", [column.name for column in COLUMNS if column.dtype.kind == "u"])
@pytest.mark.parametrize(
    ("value", "rule"), [(-1, Rule.MIN), (2**32, Rule.MAX), (0.5, Rule.TYPE), ("7", Rule.TYPE), (None, Rule.TYPE)]
)
def test_integer_column_refuses_what_it_cannot_hold(name: str, value: object, rule: Rule) -> None:
    if name == "request_ids" and value == 2**32:
        value = 2**64
    error = refusal(**{name: [*TWO_ROWS.get(name, [1])[:-1], value]})
    assert error.field.startswith(name)
    assert error.rule == rule


@pytest.mark.parametrize("name", ["logprobs", "alternative_logprobs"])
@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (float("nan"), Rule.FINITE), (float("inf"), Rule.FINITE), (float("-inf"), Rule.FINITE), (-1e300, Rule.FINITE),
        (0.25, Rule.MAX), ("-1", Rule.TYPE), (1j, Rule.TYPE),
    ],
)  # fmt: skip
def test_value_column_refuses_what_is_no_logprob(name: str, value: object, rule: Rule) -> None:
    error = refusal(**{name: [*TWO_ROWS[name][:-1], value]})
    assert error.field.startswith(name)
    assert error.rule == rule


@pytest.mark.parametrize("values", [[[3, 4, 0]], 3, [[1], [2, 3]], np.zeros((3, 1), np.uint32)])
def test_column_has_one_dimension(values: object) -> None:
    error = refusal(token_ids=values)
    assert (error.field, error.rule) == ("token_ids", Rule.TYPE)


@pytest.mark.parametrize("name", [column.name for column in COLUMNS])
def test_column_of_another_length_is_refused(name: str) -> None:
    """Any column that is an element too short or too long is refused; 566 ids need 566 logprobs (case 28)."""
    values = list(TWO_ROWS.get(name, []))
    longer = [*values, values[-1] if values else 1]
    for wrong in ([*values[:-1]], longer) if values else (longer,):
        error = refusal(**{name: wrong})
        # A changed column of counts shows in the columns that it counts.
        assert error.rule == Rule.LENGTH


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("worker_id", 7), ("worker_id", None), ("epoch", -1), ("epoch", 2**64), ("epoch", "1"), ("step", 1.5),
        ("part_count", None), ("kind", "target"), ("kind", "BATCH_KIND_TARGET"), ("selection", "yes"),
        ("selection", 7), ("draft_follows", 1), ("vocabulary_size", 2**32), ("schema_minor", -1),
        ("worker_id", "\udc80"),
    ],
)  # fmt: skip
def test_header_value_of_another_type_is_refused(name: str, value: object) -> None:
    header = HEADER._replace(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ContractError) as refused:
        encode(LogprobBatch(header, **TWO_ROWS))
    assert refused.value.field == f"header.{name}"


def test_rank_among_the_alternatives_is_the_place_of_the_value() -> None:
    error = refusal(ranks=[1, 1, 1])
    assert (error.field, error.rule) == ("ranks[1]", Rule.AGREEMENT)


def test_header_of_another_type_is_refused() -> None:
    with pytest.raises(ContractError, match=r"^header: a BatchHeader, got dict"):
        LogprobBatch({"epoch": 1})  # type: ignore[arg-type]


def test_numpy_numbers_in_the_header_are_numbers() -> None:
    header = HEADER._replace(step=np.int64(1), dp_rank=np.uint8(0))  # type: ignore[arg-type]
    assert encode(LogprobBatch(header, **TWO_ROWS)) == encode(batch())


def test_message_over_its_bound_is_refused_before_it_is_written() -> None:
    """A batch whose message would be too large is refused with both sizes (case 26)."""
    size = len(encode(batch()))
    assert len(encode(batch(), replace(Limits.default(), max_message_bytes=size))) == size
    with pytest.raises(ContractError) as refused:
        encode(batch(), replace(Limits.default(), max_message_bytes=size - 1))
    assert (refused.value.field, refused.value.limit, refused.value.actual) == ("message", size - 1, size)


def test_message_is_as_long_as_what_it_holds() -> None:
    sizes = []
    for rows in (128, 256):
        columns = {name: np.tile(values, rows // 2) for name, values in TWO_ROWS.items()}
        columns |= {"request_ids": (np.arange(rows) + 1) << 40, "batch_indices": np.arange(rows)}
        sizes.append(len(encode(LogprobBatch(HEADER._replace(step_rows=rows), **columns))))
    assert sizes[1] <= 2 * sizes[0]


def test_largest_message_of_the_schema() -> None:
    """The schema's message bound holds to the byte: 8 MiB are read, one byte more is not."""
    limits, data = Limits.schema(), encode(batch())
    # Filled up with a field that a newer minor might have: any length is a valid message.
    full = data + record(100, 2, bytes(limits.max_message_bytes - len(data) - len(record(100, 2, b"", 5))), 5)
    assert len(full) == limits.max_message_bytes == 8 * 2**20
    assert decode(full, limits) == batch()
    with pytest.raises(ContractError, match=rf"^message: at most {len(full)} bytes, got {len(full) + 1}$"):
        decode(full + b"\0", limits)


def test_errors_keep_their_parts_across_processes() -> None:
    import pickle  # noqa: PLC0415 - what is read was written here

    error = refusal(token_counts=[9, 1])
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (str(again), again.rule) == (str(error), Rule.MAX)
