"""The golden messages: every language's codec must read, and refuse, exactly these."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tokenbus_contracts import ContractError, LogprobBatch, Rule, decode, encode
from tokenbus_contracts.schema import COLUMN

VECTORS = Path(__file__).resolve().parents[2] / "contracts" / "vectors" / "v1"
VALID = sorted(path.stem for path in (VECTORS / "valid").glob("*.binpb"))
INVALID = sorted(path.stem for path in (VECTORS / "invalid").glob("*.binpb"))


def _vector(kind: str, name: str) -> tuple[bytes, dict[str, Any]]:
    data = (VECTORS / kind / f"{name}.binpb").read_bytes()
    return data, json.loads((VECTORS / kind / f"{name}.json").read_text())


def test_there_are_vectors_of_both_kinds() -> None:
    """The folder holds at least the promised number of messages, and each kind of rule is broken by one."""
    assert len(VALID) >= 20
    assert len(INVALID) >= 40
    broken = {_vector("invalid", name)[1]["rule"] for name in INVALID}
    # A value of the wrong type cannot be on the wire, and a batch over the size limit is no small file.
    assert broken == set(Rule) - {Rule.TYPE}


@pytest.mark.parametrize("name", VALID)
def test_valid_vector_decodes_to_what_its_json_says(name: str) -> None:
    data, expected = _vector("valid", name)
    batch = decode(data)
    for field, value in expected["header"].items():
        actual = getattr(batch.header, field)
        assert type(value)(actual) == value, field
    for field, values in expected["columns"].items():
        column = getattr(batch, field)
        if isinstance(values, dict):
            assert column.size == values["elements"], field
            assert hashlib.sha256(column.tobytes()).hexdigest() == values["sha256_of_little_endian"], field
        else:
            assert [type(value)(actual) for actual, value in zip(column.tolist(), values, strict=True)] == values


@pytest.mark.parametrize("name", VALID)
def test_valid_vector_encodes_to_its_plain_form(name: str) -> None:
    data, _ = _vector("valid", name)
    batch = decode(data)
    again = encode(batch)
    assert decode(again) == batch
    assert encode(decode(again)) == again


@pytest.mark.parametrize("name", INVALID)
def test_invalid_vector_is_refused_for_its_reason(name: str) -> None:
    """An invalid message is refused for the field, the rule, the limit and the value written beside it."""
    data, expected = _vector("invalid", name)
    with pytest.raises(ContractError) as refused:
        decode(data)
    error = refused.value
    refusal = {"field": error.field, "rule": error.rule, "limit": str(error.limit), "actual": str(error.actual)}
    assert refusal == {name: expected[name] for name in refusal}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_vector_is_refused_in_one_line(name: str) -> None:
    data, expected = _vector("invalid", name)
    with pytest.raises(ContractError) as refused:
        decode(data)
    line = str(refused.value)
    assert "\n" not in line
    assert line.startswith(expected["field"] + ": ")
    assert line.endswith(f", got {expected['actual']}")


def test_limits_of_the_vectors_are_those_of_the_schema() -> None:
    limits = json.loads((VECTORS / "limits.json").read_text())
    assert limits["schema"]["max_rows"] == COLUMN["request_keys"].max_items == 1024
    assert limits["schema"] == {
        "max_message_bytes": 8 * 2**20,
        "max_rows": 1024,
        "max_tokens_per_row": 16,
        "max_draft_tokens_per_row": 16,
        "max_top_k": 127,
        "max_token_id": 2**31 - 2,
    }
    assert limits["default"] == limits["schema"] | {
        "max_message_bytes": 2 * 2**20,
        "max_rows": 512,
        "max_tokens_per_row": 8,
        "max_draft_tokens_per_row": 8,
        "max_top_k": 20,
    }


def test_batches_are_compared_bit_by_bit() -> None:
    """Two batches are equal only if header and columns are; another type of object never is."""
    batch = decode(_vector("valid", "mixed_counts")[0])
    other = decode(_vector("valid", "mixed_scoring")[0])
    assert batch == decode(encode(batch))
    assert batch != other
    assert batch != LogprobBatch(batch.header)
    assert batch != "a batch"
