"""The golden messages as files: the bytes, and beside them in JSON what they must decode to or be refused for."""

import hashlib
import json
import struct
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from schema_tools.paths import Tree
from schema_tools.vectors.invalid import Invalid, invalid_vectors
from schema_tools.vectors.valid import Valid, valid_vectors
from tokenbus_contracts.limits import Limits
from tokenbus_contracts.schema import BATCH, HEADER, fields_of

_MOST_ELEMENTS_SPELLED_OUT = 1000
_WIDE = (FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_FIXED64)
_SPARSE = ("stops",)
"""Columns that are left out where they are empty."""
_FORMS = {FieldDescriptor.TYPE_FIXED64: "Q", FieldDescriptor.TYPE_FIXED32: "I", FieldDescriptor.TYPE_FLOAT: "f"}


def vector_files() -> dict[str, bytes]:
    """Return every file of the vectors' folder: its path below the folder, and its contents."""
    files = {"limits.json": _json(_limits())}
    for valid in valid_vectors():
        files[f"valid/{valid.name}.binpb"] = valid.data
        files[f"valid/{valid.name}.json"] = _json(_expected(valid))
    for invalid in invalid_vectors():
        files[f"invalid/{invalid.name}.binpb"] = invalid.data
        files[f"invalid/{invalid.name}.json"] = _json(_refusal(invalid))
    return files


def write_vectors(tree: Tree) -> list[str]:
    """Write the vectors, remove what no longer belongs there, and return the names that changed."""
    files = vector_files()
    changed = []
    for path in (path for path in tree.vectors.rglob("*") if path.is_file()):
        name = path.relative_to(tree.vectors).as_posix()
        if name not in files:
            path.unlink()
            changed.append(name)
    for name, contents in files.items():
        path = tree.vectors / name
        if not path.exists() or path.read_bytes() != contents:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents)
            changed.append(name)
    return sorted(changed)


def stale_vectors(tree: Tree) -> list[str]:
    """Return the names of files that differ from what the script writes now."""
    files = vector_files()
    present = {
        path.relative_to(tree.vectors).as_posix(): path.read_bytes()
        for path in tree.vectors.rglob("*")
        if path.is_file()
    }
    return sorted(name for name in files.keys() | present.keys() if files.get(name) != present.get(name))


def _limits() -> dict[str, Any]:
    """Return the bounds that the messages are held against: the default ones."""
    names = Limits.__slots__
    return {
        "default": {name: getattr(Limits.default(), name) for name in names},
        "schema": {name: getattr(Limits.schema(), name) for name in names},
    }


def _expected(valid: Valid) -> dict[str, Any]:
    header = {field.name: _plain(field, getattr(valid.batch.header, field.name)) for field in fields_of(HEADER)}
    columns = {
        field.name: _column(field, list(getattr(valid.batch, field.name)))
        for field in fields_of(BATCH)
        if field.name != "header" and (field.name not in _SPARSE or getattr(valid.batch, field.name))
    }
    return {"shows": valid.shows, "header": header, "columns": columns}


def _plain(field: FieldDescriptor, value: Any) -> Any:  # noqa: ANN401 - whatever a header's field holds
    """Return a value as JSON has it; 64-bit integers as strings, as protobuf's own JSON, for readers with doubles."""
    return str(value) if field.type in _WIDE else value


def _column(field: FieldDescriptor, values: list[Any]) -> Any:  # noqa: ANN401 - a list, or what stands for a long one
    if len(values) <= _MOST_ELEMENTS_SPELLED_OUT:
        return [_plain(field, value) for value in values]
    packed = struct.pack(f"<{len(values)}{_FORMS.get(field.type, 'B')}", *values)
    return {"elements": len(values), "sha256_of_little_endian": hashlib.sha256(packed).hexdigest()}


def _refusal(invalid: Invalid) -> dict[str, Any]:
    return {
        "field": invalid.field,
        "rule": invalid.rule,
        "limit": invalid.limit,
        "actual": invalid.actual,
    }


def _json(value: dict[str, Any]) -> bytes:
    """Return JSON with one line for each field, so that a change shows where it is."""
    return ("{\n" + ",\n".join(_members(value)) + "\n}\n").encode()


def _members(value: dict[str, Any], indent: str = "  ") -> Iterator[str]:
    for name, member in value.items():
        if isinstance(member, dict) and "elements" not in member:
            inner = ",\n".join(_members(member, indent + "  "))
            yield f"{indent}{json.dumps(name)}: {{\n{inner}\n{indent}}}"
        else:
            yield f"{indent}{json.dumps(name)}: {json.dumps(member)}"
