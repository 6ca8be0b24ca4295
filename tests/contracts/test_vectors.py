"""The golden messages: every language's codec must read, and refuse, exactly these."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tokenbus_contracts import ContractError, LogprobBatch, Rule, decode, encode, native

VECTORS = Path(__file__).resolve().parents[2] / "contracts" / "vectors" / "v1"
VALID = sorted(path.stem for path in (VECTORS / "valid").glob("*.binpb"))
INVALID = sorted(path.stem for path in (VECTORS / "invalid").glob("*.binpb"))


@pytest.fixture(autouse=True, params=["compiled", "numpy"])
def code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(native, "_accepts", None)


def vector(kind: str, name: str) -> tuple[bytes, dict[str, Any]]:
    data = (VECTORS / kind / f"{name}.binpb").read_bytes()
    return data, json.loads((VECTORS / kind / f"{name}.json").read_text())


def test_there_are_vectors_of_both_kinds() -> None:
    assert len(VALID) >= 20
    assert len(INVALID) >= 40
    broken = {vector("invalid", name)[1]["rule"] for name in INVALID}
    # A value of the wrong type cannot be on the wire, and a batch over the size limit is no small file.
    assert broken == set(Rule) - {Rule.TYPE}


def test_valid_vector_decodes_to_what_its_json_says() -> None:
    for name in VALID:
        data, expected = vector("valid", name)
        batch = decode(data)
        assert decode(encode(batch)) == batch, name
        for field, value in expected["header"].items():
            assert type(value)(getattr(batch.header, field)) == value, (name, field)
        for field, values in expected["columns"].items():
            column = getattr(batch, field)
            if isinstance(values, dict):
                digest = hashlib.sha256(column.tobytes()).hexdigest()
                assert (column.size, digest) == tuple(values.values()), (name, field)
            else:
                found = [type(value)(actual) for actual, value in zip(column.tolist(), values, strict=True)]
                assert found == values, (name, field)


def test_invalid_vector_is_refused_for_its_reason() -> None:
    for name in INVALID:
        data, expected = vector("invalid", name)
        with pytest.raises(ContractError) as refused:
            decode(data)
        error = refused.value
        refusal = {"field": error.field, "rule": error.rule, "limit": str(error.limit), "actual": str(error.actual)}
        assert refusal == {key: expected[key] for key in refusal}, name
        line = str(error)
        assert "\n" not in line
        assert line.startswith(f"{expected['field']}: "), name
        assert line.endswith(f", got {expected['actual']}"), name


def test_batches_are_compared_bit_by_bit() -> None:
    batch = decode(vector("valid", "mixed_counts")[0])
    other = decode(vector("valid", "mixed_scoring")[0])
    assert batch == decode(encode(batch))
    assert batch != other
    assert batch != LogprobBatch(batch.header)
    assert batch != "a batch"
