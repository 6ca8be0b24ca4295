"""Messages with a few changes in their fields or bytes; most then break the contract, and some do not."""

import struct
from collections.abc import Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from tests.contracts.other_encodings import reencoded
from tests.contracts.valid_messages import canonical, valid_message
from tokenbus_contracts.generated import logprob_batch_pb2 as pb

Field = Any
"""The stubs know two kinds of field descriptors, unrelated."""

_LARGE = (127, 128, 255, 256, 2**16 - 1, 2**16, 2**31 - 2, 2**31 - 1, 2**31, 2**32 - 1)
_WORDS = (0, 1, 2, 3, 4, 8, 9, 16, 17, 20, 21, *_LARGE)
_ENUMS = (-(2**31), -1, *range(12), 127, 128, 2**31 - 1)
_LARGEST = (2 - 2**-23) * 2.0**127
_FLOATS = (0.0, -0.0, 2.0**-149, 1.0, -9999.0, -_LARGEST, _LARGEST, float("nan"), float("inf"), float("-inf"))
_VALUES: dict[int, Sequence[Any]] = {
    FieldDescriptor.TYPE_FIXED64: (0, 1, 2, 2**63, 2**64 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 1, 2, 2**63, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED32: _WORDS,
    FieldDescriptor.TYPE_UINT32: _WORDS,
    FieldDescriptor.TYPE_ENUM: _ENUMS,
    FieldDescriptor.TYPE_FLOAT: _FLOATS,
    FieldDescriptor.TYPE_BOOL: (False, True),
    FieldDescriptor.TYPE_STRING: ("", "\0", "w" * 65, "\N{LATIN SMALL LETTER E WITH ACUTE}" * 33),
}
# NaNs, quiet and signalling, of both signs; the infinities; the numbers next to zero; all bits.
_PATTERNS = tuple(
    struct.pack("<I", bits)
    for bits in (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7F800000, 0xFF800000, 1, 2**31 + 1, 2**32 - 1)
)


def mutated(rng: Random) -> bytes:
    message = valid_message(rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        mutate(rng, message)
    return _some_encoding(rng, message)


def damaged(rng: Random) -> bytes:
    data = _some_encoding(rng, valid_message(rng))
    other = canonical(valid_message(rng))
    for _ in range(rng.choice((1, 1, 2, 4))):
        data = damage(rng, data, other)
    return data


def _some_encoding(rng: Random, message: pb.LogprobBatch) -> bytes:
    return canonical(message) if rng.random() < 0.7 else reencoded(rng, message)


def mutate(rng: Random, message: pb.LogprobBatch) -> None:
    columns: list[Field] = [field for field in message.DESCRIPTOR.fields if field.is_repeated]
    number = rng.randrange(4 * len(columns))
    if not number:
        message.ClearField("header")
    elif number < len(columns):
        field: Field = rng.choice(list(message.header.DESCRIPTOR.fields))
        setattr(message.header, field.name, rng.choice(_VALUES[field.type]))
    else:
        # Columns with elements have more to break.
        field = rng.choice([field for field in columns if getattr(message, field.name)] or columns)
        values = getattr(message, field.name)
        changed = _changed(rng, field, list(values))
        del values[:]
        values.extend(changed)


def _changed(rng: Random, field: Field, values: list[Any]) -> list[Any]:
    some = rng.choice(_VALUES[field.type])
    if not values:
        return [some]
    one, other = rng.randrange(len(values)), rng.randrange(len(values))
    match rng.choice(("set", "set", "next", "next", "swap", "copy", "insert", "delete", "clear", "reverse")):
        case "set":
            values[one] = some
        case "next":
            values[one] = _next(field, values[one], rng.choice((-1, 1)))
        case "swap":
            values[one], values[other] = values[other], values[one]
        case "copy":
            values[one] = values[other]
        case "insert":
            values.insert(one, rng.choice((some, values[other])))
        case "delete":
            del values[one]
        case "clear":
            values.clear()
        case _:
            values.reverse()
    return values


def _next(field: Field, value: Any, step: int) -> Any:  # noqa: ANN401 - a number of the field's type
    if field.type == FieldDescriptor.TYPE_FLOAT:
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        return struct.unpack("<f", struct.pack("<I", (bits + step) % 2**32))[0]
    if field.type == FieldDescriptor.TYPE_ENUM:
        return value + step if abs(value) < 2**31 - 1 else 0
    return (value + step) % (2**64 if field.type == FieldDescriptor.TYPE_FIXED64 else 2**32)


def damage(rng: Random, data: bytes, other: bytes) -> bytes:
    begin = rng.randint(0, len(data))
    end, new = rng.randint(begin, len(data)), b""
    match rng.choice(("flip", "flip", "flip", "flip", "set", "float", "float", "insert", "delete", "double", "splice")):
        case "flip":
            end = begin + 1
            new = bytes(byte ^ 1 << rng.randrange(8) for byte in data[begin:end])
        case "set":
            end, new = begin + 1, rng.choice((b"\0", b"\1", b"\x7f", b"\x80", b"\xff"))
        case "float":
            end, new = begin + 4, rng.choice(_PATTERNS)
        case "insert":
            end, new = begin, rng.randbytes(rng.randint(1, 4))
        case "delete":
            end = rng.choice((begin + rng.randint(1, 16), end, len(data)))
        case "double":
            new = data[begin:end] * 2
        case _:
            end, new = len(data), other[rng.randint(0, len(other)) :]
    return data[:begin] + new + data[end:]
