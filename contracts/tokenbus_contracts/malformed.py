"""Explains why bytes are not a valid message, after the generated classes have refused the bytes."""

from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tokenbus_contracts.errors import ContractError
from tokenbus_contracts.schema import BATCH, COLUMN, DTYPES

_VARINT, _FIXED64, _LENGTH, _START_GROUP, _END_GROUP, _FIXED32 = range(6)
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}
_ITEM_SIZES = {kind: dtype.itemsize for kind, dtype in DTYPES.items()}
_VARINT_MAX_BYTES = 10
_MOST_FIELDS = 4096
"""The maximum number of fields to inspect: enough for a damaged message, and too few to keep a process busy."""


def explain(data: bytes, message: Descriptor = BATCH) -> ContractError:
    """Return the error that names a message's first malformed field."""
    try:
        _walk(data, message, "", iter(range(_MOST_FIELDS)))
    except ContractError as error:
        return error
    # All inspected fields are well-formed, so the parser found a fault in a deeper or later field.
    return ContractError("message", "fields that parse", "one with damaged contents")


def field_numbers(data: bytes, most: int = _MOST_FIELDS) -> Iterator[int]:
    """Yield the numbers of a message's first fields without inspecting the contents of the fields."""
    return (number for number, *_ in _fields(data, 0, most))


def place_of(data: bytes, field: str, message: Descriptor = BATCH) -> int:
    """Return the offset of the field that an error names, or of its enclosing message if the field is missing."""
    begin = place = 0
    for part in field.split("."):
        name, _, element = part.rstrip("]").partition("[")
        known = message.fields_by_name.get(name)
        fields = _fields(data, begin, _MOST_FIELDS) if known is not None else ()
        found = next((each for each in fields if known is not None and each[0] == known.number), None)
        if known is None or found is None:
            return begin + int(element) if name == "message" and element else begin
        _, place, begin, end = found
        data = data[:end]
        if element:
            return begin + int(element) * _ITEM_SIZES.get(known.type, 1)
        if known.message_type is None:
            return place
        message = known.message_type
    return place


def _fields(data: bytes, at: int, most: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the number of each field, and the offsets of the field, of its contents and of the next field.

    Iteration stops after `most` fields, at a malformed field, and at a group, because the schema has no groups.
    """
    for _ in range(most):
        if at >= len(data):
            return
        try:
            key, contents = _read_varint(data, at, "message")
            contents, behind = _contents(data, contents, key & 7, "message")
        except ContractError:
            return
        yield key >> 3, at, contents, min(behind, len(data))
        at = behind


def _walk(data: bytes, message: Descriptor, prefix: str, left: Iterator[int]) -> None:
    """Check a message's fields and nested messages one by one. Stop when the iterator `left` is exhausted."""
    at = 0
    groups: list[str] = []
    while at < len(data):
        if next(left, None) is None:
            return
        here = f"{prefix.rstrip('.') or 'message'}[{at}]"
        key, behind = _read_varint(data, at, here)
        number, wire_type = key >> 3, key & 7
        known = message.fields_by_number.get(number)
        name = prefix + (known.name if known else f"field {number}")
        if not number:
            raise ContractError(here, "a field number from 1", "0")
        if wire_type == _START_GROUP:
            groups.append(name)
        elif wire_type == _END_GROUP:
            if not groups or groups.pop() != name:
                raise ContractError(name, "a group that began", "the end of one that did not")
        else:
            start, behind = _contents(data, behind, wire_type, name)
            if behind > len(data):
                limit = f"at most the {len(data) - start} bytes that are left"
                raise ContractError(name, limit, f"a length of {behind - start}")
            if wire_type == _LENGTH and known and not groups:
                _look_into(known, data[start:behind], name, left)
        at = behind
    if groups:
        raise ContractError(groups[-1], "a group that ends", "the end of the message within it")


def _look_into(field: FieldDescriptor, contents: bytes, name: str, left: Iterator[int]) -> None:
    """Raise a ContractError if the contents of a known field are malformed."""
    if field.message_type is not None:
        _walk(contents, field.message_type, f"{name}.", left)
    elif field.type == FieldDescriptor.TYPE_STRING:
        try:
            contents.decode()
        except UnicodeDecodeError as error:
            found = f"{contents[error.start]:#04x} at its byte {error.start}"
            raise ContractError(name, "text in UTF-8", found) from None
    elif field.type in _ITEM_SIZES and len(contents) % _ITEM_SIZES[field.type]:
        raise ContractError(name, f"elements of {_ITEM_SIZES[field.type]} bytes", f"{len(contents)} bytes")
    elif name in COLUMN and COLUMN[name].item_bytes == 1 and contents and contents[-1] >= 1 << 7:
        raise ContractError(name, "whole varints", "the end of the column within one")


def _contents(data: bytes, at: int, wire_type: int, name: str) -> tuple[int, int]:
    """Return the start and the end of a field's contents. The end may exceed the message, and groups are refused."""
    if wire_type == _VARINT:
        return at, _read_varint(data, at, name)[1]
    if wire_type == _LENGTH:
        length, at = _read_varint(data, at, name)
        return at, at + length
    if wire_type not in _FIXED_SIZES:
        raise ContractError(name, "a wire type from 0 to 5", str(wire_type))
    return at, at + _FIXED_SIZES[wire_type]


def _read_varint(data: bytes, at: int, name: str) -> tuple[int, int]:
    value = 0
    for place, digit in enumerate(data[at : at + _VARINT_MAX_BYTES]):
        value |= (digit & 0x7F) << 7 * place
        if digit < 1 << 7:
            return value, at + place + 1
    if at + _VARINT_MAX_BYTES <= len(data):
        raise ContractError(name, f"a varint of at most {_VARINT_MAX_BYTES} bytes", "a longer one")
    raise ContractError(name, "a whole varint", "the end of the message within one")
