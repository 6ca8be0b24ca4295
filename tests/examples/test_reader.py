"""The reader in Node, on every golden message."""

import hashlib
import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.examples.programs import program
from tests.support.waiting import MOST
from tokenbus_contracts.schema import COLUMN

VECTORS = Path(__file__).resolve().parents[2] / "contracts" / "vectors" / "v1"


@cache
def findings(kind: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return what the reader says of each golden message of a kind, and what the JSON beside it says."""
    messages = sorted((VECTORS / kind).glob("*.binpb"))
    command = [*program("reader"), *map(str, messages)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=MOST, check=False)
    assert run.returncode == 0, run.stderr
    said = [json.loads(line) for line in run.stdout.splitlines()]
    wanted = [json.loads(message.with_suffix(".json").read_text()) for message in messages]
    return {path.stem: (found, told) for path, found, told in zip(messages, said, wanted, strict=True)}


def digest(name: str, elements: list[Any]) -> dict[str, object]:
    column = np.array([float(each) if COLUMN[name].dtype.kind == "f" else int(each) for each in elements])
    packed = column.astype(COLUMN[name].dtype).tobytes()
    return {"elements": len(elements), "sha256_of_little_endian": hashlib.sha256(packed).hexdigest()}


def same(name: str, elements: list[Any], wanted: Any) -> bool:  # noqa: ANN401 - a list, or what stands for a long one
    """Tell whether a column is what the JSON says: floats as float32, since the reader may write fewer digits."""
    if isinstance(wanted, dict):
        return digest(name, elements) == wanted
    if COLUMN[name].dtype.kind == "f":
        return np.array(elements, np.float32).tobytes() == np.array(wanted, np.float32).tobytes()
    return bool(elements == wanted)


def test_reader_finds_what_the_json_says() -> None:
    found = findings("valid")
    assert len(found) >= 20
    for message, (said, wanted) in found.items():
        assert said.get("header") == wanted["header"], message
        for name, elements in said["columns"].items():
            assert same(name, elements, wanted["columns"].get(name, [])), (message, name)
        assert said["columns"].keys() == COLUMN.keys()


def test_reader_refuses_for_the_rule_that_the_json_names() -> None:
    found = findings("invalid")
    assert len(found) >= 40
    for message, (said, wanted) in found.items():
        assert said.get("rule") == wanted["rule"], message
        assert wanted["rule"] == "malformed" or said["field"] == wanted["field"], message
