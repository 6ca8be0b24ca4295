"""Golden messages: files with bytes, and JSON files with the expected contents or the expected error.

Existing bytes are never rewritten, and `make vectors` derives all other files from the bytes. Protobuf's generated
class, not the codec, makes the JSON of a valid message, so that tests can compare the codec with this JSON. To add a
message, write the JSON of its header and columns: `make vectors` then writes its bytes. If the generated class cannot
write certain bytes, write these bytes by hand, with a JSON file that names the error.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import DecodeError

from schema_tools.compiled import SchemaError, Tree
from tokenbus_contracts.generated.logprob_batch_pb2 import LogprobBatch
from tokenbus_contracts.limits import Limits
from tokenbus_contracts.schema import COLUMN, COLUMNS, EXTRA_COLUMNS, HEADER, fields_of

_SUMS = "SHA256SUMS"
_MOST_ELEMENTS_SPELLED_OUT = 1000
_SPARSE = ("stops", *(column.name for column in EXTRA_COLUMNS))
"""The columns that the JSON omits if they are empty."""


def write_vectors(tree: Tree) -> list[str]:
    """Write missing and outdated files, and return the names of the changed files."""
    files = _files(tree)
    changed = [name for name in sorted(files) if _bytes_of(tree.vectors / name) != files[name]]
    for name in changed:
        (tree.vectors / name).write_bytes(files[name])
    return changed


def vector_faults(tree: Tree) -> Iterator[str]:
    """Yield a line for each file that is outdated, missing or not expected."""
    files = _files(tree)
    present = {path.relative_to(tree.vectors).as_posix() for path in tree.vectors.rglob("*") if path.is_file()}
    for name in sorted(files.keys() | present):
        if name not in files:
            yield f"{name}: neither a golden message nor its JSON"
        elif _bytes_of(tree.vectors / name) != files[name]:
            yield f"{name}: out of date with the golden messages; run `make vectors` and look at the difference"


def _files(tree: Tree) -> dict[str, bytes]:
    """Return the required contents of the vectors' folder, by relative path."""
    recorded = (_bytes_of(tree.vectors / _SUMS) or b"").decode().splitlines()
    sums = {name: value for value, _, name in (line.partition("  ") for line in recorded)}
    files = {"limits.json": _json(_limits())}
    for path in sorted(tree.vectors.glob("*valid/*.json")):
        name = path.relative_to(tree.vectors).with_suffix("").as_posix()
        written = json.loads(path.read_bytes())
        data = _bytes_of(path.with_suffix(".binpb"))
        data = _encoded(name, written) if data is None else data
        known = sums.setdefault(f"{name}.binpb", _sum(data))
        if known != _sum(data):
            raise SchemaError(
                f"{name}.binpb: sha256 {known} in {_SUMS}, got {_sum(data)}; golden messages must not change"
            )
        is_valid = name.startswith("valid/")
        files |= {f"{name}.binpb": data, f"{name}.json": _json(_decoded(name, data, written) if is_valid else written)}
    if lost := sorted(sums.keys() - files.keys()):
        raise SchemaError(f"{lost[0]}: in {_SUMS}, but has no JSON; golden messages must not be removed")
    files[_SUMS] = "".join(f"{value}  {name}\n" for name, value in sorted(sums.items())).encode()
    return files


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _bytes_of(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _encoded(name: str, written: dict[str, Any]) -> bytes:
    """Return the bytes of a new message from the JSON of its header and columns."""
    try:
        message = ParseDict({"header": written["header"], **written["columns"]}, LogprobBatch())
    except (KeyError, ParseError) as error:
        raise SchemaError(f"{name}.json: its header and columns do not form a message: {error}") from None
    return message.SerializeToString(deterministic=True)


def _decoded(name: str, data: bytes, written: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of the JSON file for valid bytes. Only its description, `shows`, is written by hand."""
    try:
        batch = LogprobBatch.FromString(data)
    except DecodeError as error:
        raise SchemaError(f"{name}.binpb: {error}") from None
    given = MessageToDict(
        batch, preserving_proto_field_name=True, always_print_fields_with_no_presence=True, use_integers_for_enums=True
    )
    header = {field.name: given["header"][field.name] for field in fields_of(HEADER)}
    columns = {each.name: given[each.name] for each in COLUMNS if given[each.name] or each.name not in _SPARSE}
    for column, values in columns.items():
        if len(values) > _MOST_ELEMENTS_SPELLED_OUT:
            packed = np.array(getattr(batch, column), COLUMN[column].dtype).tobytes()
            columns[column] = {"elements": len(values), "sha256_of_little_endian": _sum(packed)}
    return {"shows": written.get("shows", ""), "header": header, "columns": columns}


def _limits() -> dict[str, Any]:
    """Return the limits that readers enforce when they decode the messages."""
    both = {"default": Limits.default(), "schema": Limits.schema()}
    return {kind: {name: getattr(limits, name) for name in Limits.__slots__} for kind, limits in both.items()}


def _json(value: dict[str, Any]) -> bytes:
    """Return JSON with one line for each field, so that a diff shows the changed fields."""
    return ("{\n" + ",\n".join(_members(value)) + "\n}\n").encode()


def _members(value: dict[str, Any], indent: str = "  ") -> Iterator[str]:
    for name, member in value.items():
        if isinstance(member, dict) and "elements" not in member:
            inner = ",\n".join(_members(member, indent + "  "))
            yield f"{indent}{json.dumps(name)}: {{\n{inner}\n{indent}}}"
        else:
            yield f"{indent}{json.dumps(name)}: {json.dumps(member)}"
