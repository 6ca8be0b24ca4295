"""Why some bytes are no message at all: for people, after the generated classes refused them."""

from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.schema import BATCH

_VARINT, _FIXED64, _LENGTH, _START_GROUP, _END_GROUP, _FIXED32 = range(6)
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}
_VARINT_MAX_BYTES = 10
_MOST_FIELDS = 4096
"""How many fields are looked at: enough for any message that was damaged, too few to be kept busy with."""


class _BrokenError(Exception):
    """The walk met something that no message has."""

    def __init__(self, field: str, limit: str, actual: str) -> None:
        super().__init__(field, limit, actual)
        self.error = ContractError(field, limit, actual, rule=Rule.MALFORMED)


def explain(data: bytes) -> ContractError:
    """Return the error that names the first place where a message's own fields do not add up."""
    at = 0
    groups: list[str] = []
    try:
        for _ in range(_MOST_FIELDS):
            if at == len(data):
                break
            at = _skip(data, at, groups)
    except _BrokenError as broken:
        return broken.error
    if groups and at == len(data):
        limit, actual = "a group that ends", "the end of the message within it"
        return ContractError(groups[-1], limit, actual, rule=Rule.MALFORMED)
    # The outermost fields add up, as far as they were looked at: what the parser met lies within one of them.
    return ContractError("message", "fields that parse", "one with damaged contents", rule=Rule.MALFORMED)


def _skip(data: bytes, at: int, groups: list[str]) -> int:
    """Return the place behind the field, or the group's beginning or end, at a place."""
    key, behind = _read_varint(data, at, f"message[{at}]")
    number, wire_type = key >> 3, key & 7
    known = BATCH.fields_by_number.get(number)
    name = known.name if known else f"field {number}"
    if not number:
        raise _BrokenError(f"message[{at}]", "a field number from 1", "0")
    if wire_type == _VARINT:
        return _read_varint(data, behind, name)[1]
    if wire_type in _FIXED_SIZES:
        return _within(data, behind, _FIXED_SIZES[wire_type], name)
    if wire_type == _LENGTH:
        length, behind = _read_varint(data, behind, name)
        return _within(data, behind, length, name)
    if wire_type == _START_GROUP:
        groups.append(name)
    elif wire_type == _END_GROUP:
        if not groups or groups.pop() != name:
            raise _BrokenError(name, "a group that began", "the end of one that did not")
    else:
        raise _BrokenError(name, "a wire type from 0 to 5", str(wire_type))
    return behind


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
