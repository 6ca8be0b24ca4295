"""Why some bytes are no message at all: for people, after the generated classes refused them."""

from collections.abc import Collection, Iterator

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.schema import BATCH, COLUMN

_VARINT, _FIXED64, _LENGTH, _START_GROUP, _END_GROUP, _FIXED32 = range(6)
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}
_ITEM_SIZES = {
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_FLOAT: 4,
}
_VARINT_MAX_BYTES = 10
_MOST_PEEKED = 8
_MOST_FIELDS = 4096
"""How many fields are looked at: enough for any message that was damaged, too few to be kept busy with."""


class _BrokenError(Exception):
    """The walk met something that no message has."""

    def __init__(self, field: str, limit: str, actual: str) -> None:
        super().__init__(field, limit, actual)
        self.error = ContractError(field, limit, actual, rule=Rule.MALFORMED)


def explain(data: bytes, message: Descriptor = BATCH) -> ContractError:
    """Return the error that names the first place where a message's own fields do not add up."""
    try:
        _Walk().over(data, message, "")
    except _BrokenError as broken:
        return broken.error
    # As far as it was looked at, all adds up: what the parser met lies deeper, or further on.
    return ContractError("message", "fields that parse", "one with damaged contents", rule=Rule.MALFORMED)


def first_unknown_field(data: bytes, message: Descriptor) -> int | None:
    """Return the number of the first field that a message's type does not have, or None; the message was parsed.

    Fields that it has, though encoded as none of their type, are not unknown. Only the first fields are looked at.
    """
    return next((number for number in _numbers(data, _MOST_FIELDS) if number not in message.fields_by_number), None)


def first_of(data: bytes, numbers: Collection[int]) -> int | None:
    """Return the number of the first field that is one of some, or None; few fields are looked at, none is read."""
    return next((number for number in _numbers(data, _MOST_PEEKED) if number in numbers), None)


def _numbers(data: bytes, most: int) -> Iterator[int]:
    """Yield the numbers of a message's first fields, up to a group, which no field of ours is, or what is broken."""
    at = 0
    for _ in range(most):
        if at >= len(data):
            return
        try:
            key, at = _read_varint(data, at, "message")
            yield key >> 3
            at = _behind_contents(data, at, key & 7)
        except _BrokenError:
            return


def place_of(data: bytes, field: str, message: Descriptor = BATCH) -> int:
    """Return the offset of the field that an error names; where that is missing, of the message that should hold it."""
    begin, end, place = 0, len(data), 0
    for part in field.split("."):
        name, _, element = part.rstrip("]").partition("[")
        known = message.fields_by_name.get(name)
        found = _find(data, begin, end, known.number) if known else None
        if known is None or found is None:
            return begin + int(element) if name == "message" and element else begin
        place, begin, end = found
        if element:
            return begin + int(element) * _ITEM_SIZES.get(known.type, 1)
        if known.message_type is None:
            return place
        message = known.message_type
    return place


def _find(data: bytes, at: int, end: int, number: int) -> tuple[int, int, int] | None:
    for _ in range(_MOST_FIELDS):
        if at >= end:
            return None
        begin = at
        try:
            key, at = _read_varint(data, at, "message")
            contents = at if key & 7 != _LENGTH else _read_varint(data, at, "message")[1]
            is_found = key >> 3 == number
            at = min(end, len(data)) if is_found and key & 7 == _LENGTH else _behind_contents(data, at, key & 7)
        except _BrokenError:
            return None
        if is_found:
            return begin, contents, at
    return None


class _Walk:
    """A walk over a message and what is nested in it, which ends where something is broken or after enough fields."""

    def __init__(self) -> None:
        self._left = _MOST_FIELDS

    def over(self, data: bytes, message: Descriptor, prefix: str) -> None:
        """Look at a message's fields one by one."""
        at = 0
        groups: list[str] = []
        while at < len(data):
            if not self._left:
                return
            self._left -= 1
            at = self._skip(data, at, message, prefix, groups)
        if groups:
            raise _BrokenError(groups[-1], "a group that ends", "the end of the message within it")

    def _skip(self, data: bytes, at: int, message: Descriptor, prefix: str, groups: list[str]) -> int:
        """Return the place behind the field, or the group's beginning or end, at a place."""
        here = f"{prefix.rstrip('.') or 'message'}[{at}]"
        key, behind = _read_varint(data, at, here)
        number, wire_type = key >> 3, key & 7
        known = message.fields_by_number.get(number)
        name = prefix + (known.name if known else f"field {number}")
        if not number:
            raise _BrokenError(here, "a field number from 1", "0")
        if wire_type == _VARINT:
            return _read_varint(data, behind, name)[1]
        if wire_type in _FIXED_SIZES:
            return _within(data, behind, _FIXED_SIZES[wire_type], name)
        if wire_type == _LENGTH:
            length, start = _read_varint(data, behind, name)
            behind = _within(data, start, length, name)
            if known and not groups:
                self._look_into(known, data[start:behind], name)
        elif wire_type == _START_GROUP:
            groups.append(name)
        elif wire_type == _END_GROUP:
            if not groups or groups.pop() != name:
                raise _BrokenError(name, "a group that began", "the end of one that did not")
        else:
            raise _BrokenError(name, "a wire type from 0 to 5", str(wire_type))
        return behind

    def _look_into(self, field: FieldDescriptor, contents: bytes, name: str) -> None:
        """Find out what is wrong with a known field's contents, if anything is."""
        if field.message_type is not None:
            self.over(contents, field.message_type, f"{name}.")
        elif field.type == FieldDescriptor.TYPE_STRING:
            try:
                contents.decode()
            except UnicodeDecodeError as error:
                raise _BrokenError(
                    name, "text in UTF-8", f"{contents[error.start]:#04x} at its byte {error.start}"
                ) from None
        elif field.type in _ITEM_SIZES and len(contents) % _ITEM_SIZES[field.type]:
            limit = f"elements of {_ITEM_SIZES[field.type]} bytes"
            raise _BrokenError(name, limit, f"{len(contents)} bytes")
        elif name in COLUMN and COLUMN[name].is_bytes and contents and contents[-1] >= 1 << 7:
            raise _BrokenError(name, "whole varints", "the end of the column within one")


def _behind_contents(data: bytes, at: int, wire_type: int) -> int:
    """Return the place behind what a key announces, which is no group."""
    if wire_type == _VARINT:
        return _read_varint(data, at, "message")[1]
    if wire_type == _LENGTH:
        length, at = _read_varint(data, at, "message")
        return _within(data, at, length, "message")
    if wire_type not in _FIXED_SIZES:
        raise _BrokenError("message", "a field", "a group")
    return _within(data, at, _FIXED_SIZES[wire_type], "message")


def _within(data: bytes, at: int, length: int, name: str) -> int:
    left = len(data) - at
    if length > left:
        raise _BrokenError(name, f"at most the {left} bytes that are left", f"a length of {length}")
    return at + length


def _read_varint(data: bytes, at: int, name: str) -> tuple[int, int]:
    value = 0
    for place, digit in enumerate(data[at : at + _VARINT_MAX_BYTES]):
        value |= (digit & 0x7F) << 7 * place
        if digit < 1 << 7:
            return value, at + place + 1
    if at + _VARINT_MAX_BYTES <= len(data):
        raise _BrokenError(name, f"a varint of at most {_VARINT_MAX_BYTES} bytes", "a longer one")
    raise _BrokenError(name, "a whole varint", "the end of the message within one")
