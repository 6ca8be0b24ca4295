"""Limits: read from the schema, tightened by a deployment, never widened."""

from dataclasses import fields, replace

import pytest

from tests.contracts.test_vectors import VECTORS
from tokenbus_contracts import ContractError, Limits, Rule, decode, encode
from tokenbus_contracts.generated.enums import BatchKind, RowStatus, Scoring, SpeculativeMethod, StepPhase, ValueKind
from tokenbus_contracts.header import BatchHeader
from tokenbus_contracts.schema import BATCH, COLUMNS, HEADER, STATUS_RULES, fields_of

NAMES = [field.name for field in fields(Limits)]


@pytest.mark.parametrize("name", NAMES)
def test_limit_wider_than_the_schema_is_refused(name: str) -> None:
    most = getattr(Limits.schema(), name)
    with pytest.raises(ContractError, match=rf"limits\.{name}: at most {most}, got {most + 1}") as refused:
        replace(Limits.schema(), **{name: most + 1})
    assert refused.value.rule == Rule.MAX


@pytest.mark.parametrize("value", [-1, 1.5, "8", None, True])
def test_limit_that_is_no_count_is_refused(value: object) -> None:
    with pytest.raises(ContractError, match=r"limits\.max_rows: "):
        replace(Limits.default(), max_rows=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "limit", "field"),
    [
        ("max_rows", 1, "request_ids"),
        ("max_tokens_per_row", 2, "token_counts[1]"),
        ("max_draft_tokens_per_row", 1, "draft_token_counts[0]"),
        ("max_top_k", 1, "top_ks[0]"),
        ("max_token_id", 11, "token_ids[2]"),
        ("max_message_bytes", 100, "message"),
    ],
)
def test_tightened_limit_is_enforced_both_ways(name: str, limit: int, field: str) -> None:
    data = (VECTORS / "valid" / "mixed_counts.binpb").read_bytes()
    batch = decode(data)
    limits = replace(Limits.default(), **{name: limit})
    for use in (lambda: encode(batch, limits), lambda: decode(data, limits)):
        with pytest.raises(ContractError) as refused:
            use()
        assert (refused.value.field, refused.value.limit) == (field, limit)


def test_header_of_the_schema_and_of_python_have_the_same_fields() -> None:
    assert set(BatchHeader._fields) == {field.name for field in fields_of(HEADER)}
    for enum in (BatchKind, StepPhase, SpeculativeMethod, ValueKind, RowStatus, Scoring):
        described = BATCH.file.enum_types_by_name[enum.__name__]
        assert [int(value) for value in enum] == [value.number for value in described.values]
    assert {RowStatus(number) for number in STATUS_RULES} == set(RowStatus) - {RowStatus.UNSPECIFIED}


def test_every_column_of_the_schema_is_a_column_of_the_batch() -> None:
    assert ["header", *(column.name for column in COLUMNS)] == [field.name for field in fields_of(BATCH)]
