"""JSON Schema of the messages in protobuf's JSON form, with the schema's bounds."""

import base64
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto

from tokenbus_contracts.generated.bounds_pb2 import ColumnLength
from tokenbus_contracts.published.descriptors import Field, Schema

Document = dict[str, Any]
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_WIDE = (FieldDescriptorProto.TYPE_UINT64, FieldDescriptorProto.TYPE_FIXED64)
_SIGNED = (FieldDescriptorProto.TYPE_SINT32, FieldDescriptorProto.TYPE_INT32)
_FLOATS = (FieldDescriptorProto.TYPE_FLOAT, FieldDescriptorProto.TYPE_DOUBLE)
_NOT_FINITE = ["NaN", "Infinity", "-Infinity"]
_MOST = {True: 2**64 - 1, False: 2**32 - 1}


def json_schema(schema: Schema, name: str = "LogprobBatch") -> Document:
    """Return the JSON Schema of a message type and of all messages and enums that its fields reach.

    The descriptions state the rules that JSON Schema cannot express, such as the length of a column.
    """
    return {
        "$schema": _DIALECT,
        "title": f"tokenbus.v1.{name}",
        "$ref": f"#/$defs/{name}",
        "$defs": definitions(schema, [name], "#/$defs/"),
    }


def definitions(schema: Schema, names: list[str], place: str) -> Document:
    """Return the schemas of the named messages and of all types that they use. Each reference begins with `place`."""
    writer = _Writer(schema, place)
    reached = sorted(set().union(*map(schema.reached_from, names)))
    return {each: writer.message(each) if each in schema.messages else writer.enum(each) for each in reached}


class _Writer:
    """Writes the JSON Schemas of messages and enums. Each reference begins with a prefix."""

    def __init__(self, schema: Schema, place: str) -> None:
        self._schema = schema
        self._place = place

    def message(self, name: str) -> Document:
        message = self._schema.messages[name]
        required = [field.proto.json_name for field in message.fields if field.must_be_set]
        found: Document = {
            "type": "object",
            "description": message.comment,
            "properties": {field.proto.json_name: self._field(field) for field in message.fields},
        }
        if required:
            found["required"] = required
        choices = [_one_of([field.proto.json_name for field in fields]) for fields in message.oneofs().values()]
        if choices:
            found["allOf"] = choices
        return found

    def enum(self, name: str) -> Document:
        enum = self._schema.enums[name]
        numbers = "; ".join(f"{value.name} ({value.number}): {comment}" for value, comment in enum.values)
        names = [value.name for value, _ in enum.values]
        return {
            "description": f"{enum.comment} {numbers}",
            "anyOf": [{"enum": names}, {"type": "integer", "minimum": 0}],
        }

    def _field(self, field: Field) -> Document:
        bounds = field.bounds
        each = self._value(field)
        if not field.is_repeated:
            return each | {"description": field.comment}
        found: Document = {"type": "array", "description": field.comment, "items": each}
        if bounds.HasField("max_items"):
            found["maxItems"] = bounds.max_items
        if bounds.unique:
            found["uniqueItems"] = True
        if bounds.length:
            length = ColumnLength.Name(bounds.length).removeprefix("COLUMN_LENGTH_").lower().replace("_", " ")
            found["description"] = f"{field.comment} One element for each of the {length}."
        return found

    def _value(self, field: Field) -> Document:
        kind, bounds = field.proto.type, field.bounds
        if field.type_name:
            found: Document = {"$ref": f"{self._place}{field.type_name}"}
            if bounds.min and field.type_name in self._schema.enums:
                found["not"] = {"enum": [0, self._schema.enums[field.type_name].values[0][0].name]}
            return found
        if kind == FieldDescriptorProto.TYPE_BOOL:
            return {"type": "boolean"}
        if kind == FieldDescriptorProto.TYPE_STRING:
            return {"type": "string", "maxLength": bounds.max_bytes, **({"minLength": 1} if bounds.min_bytes else {})}
        if kind == FieldDescriptorProto.TYPE_BYTES:
            longest = len(base64.b64encode(bytes(bounds.max_bytes)))
            return {"type": "string", "contentEncoding": "base64", "maxLength": longest}
        if kind in _FLOATS:
            return _of_float(field)
        return _of_integer(field)


def _of_float(field: Field) -> Document:
    bounds = field.bounds
    if not bounds.finite:
        return {"anyOf": [{"type": "number"}, {"enum": _NOT_FINITE}]}
    return {"type": "number", **({"minimum": bounds.min} if bounds.HasField("min") else {})}


def _one_of(names: list[str]) -> Document:
    """Return a schema that allows one of the names, or none, because a newer minor version may add names."""
    each = [{"required": [name]} for name in names]
    return {"oneOf": [*each, {"not": {"anyOf": each}}]}


def _of_integer(field: Field) -> Document:
    is_wide, bounds = field.proto.type in _WIDE, field.bounds
    least = bounds.least if bounds.HasField("least") else bounds.min if bounds.HasField("min") else 0
    most = bounds.max if bounds.HasField("max") else _MOST[is_wide]
    if field.proto.type in _SIGNED and not bounds.HasField("least"):
        least, most = -(2**31), 2**31 - 1
    found: Document = {"type": "integer", "minimum": least, "maximum": most}
    # Protobuf writes 64-bit integers as strings in JSON, but also accepts numbers when it reads JSON.
    digits = "^[1-9][0-9]*$" if least else "^[0-9]+$"
    return found | {"type": ["string", "integer"], "pattern": digits} if is_wide else found
