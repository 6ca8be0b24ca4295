"""Other encodings of a message: what every protobuf parser must read as the same message."""

import struct
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor

from tokenbus_contracts.generated import logprob_batch_pb2 as pb

Field = Any
"""The stubs know two kinds of field descriptors, unrelated."""

_VARINT, _FIXED64, _LENGTH, _, _END_GROUP, _FIXED32 = range(6)
_FIXED = {
    FieldDescriptor.TYPE_FIXED64: ("<Q", _FIXED64),
    FieldDescriptor.TYPE_FIXED32: ("<I", _FIXED32),
    FieldDescriptor.TYPE_FLOAT: ("<f", _FIXED32),
}
_NARROW = (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_ENUM)
_LONGEST_VARINT = 10

LONGEST_KEY = 5
"""The most bytes of a key that every parser reads: a key has 32 bits, and parsers count them."""


def varint(value: int, size: int = 0) -> bytes:
    digits = bytearray()
    while value > 0x7F or len(digits) + 1 < size:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def record(number: int, wire_type: int, contents: bytes, size: int = 0) -> bytes:
    """Return one field, its key and length padded to a size."""
    length = varint(len(contents), size) if wire_type == _LENGTH else b""
    return varint(number << 3 | wire_type, size) + length + contents


class _Style(NamedTuple):
    """How far an encoding strays from the shortest one: how often, from never to always, and with which keys."""

    rng: Random
    loose: float
    longest_key: int

    def strays(self, share: float = 1.0) -> bool:
        return self.rng.random() < self.loose * share

    def key_bytes(self) -> int:
        return self.rng.randint(0, self.longest_key) if self.strays() else 0


def reencoded(rng: Random, message: pb.LogprobBatch, longest_key: int = LONGEST_KEY) -> bytes:
    """Return the message in another encoding; with longer keys than parsers read it is one that none may read."""
    fields: list[Field] = [field for field in message.DESCRIPTOR.fields if field.is_repeated]
    style = _Style(rng, rng.choice((0.0, 0.0, 0.2, 1.0)), longest_key)
    queues = [_column_records(style, field, getattr(message, field.name)) for field in fields]
    queues += [[_unknown(style, fields)] for _ in range(3) if style.strays(0.5)]
    if message.HasField("header"):
        queues.append(_header_records(style._replace(loose=rng.choice((0.0, 0.2, 1.0))), message.header))
    # In any order that keeps that of each queue.
    turns = [queue for queue, records in enumerate(queues) for _ in records]
    rng.shuffle(turns)
    waiting = [iter(records) for records in queues]
    return b"".join(next(waiting[turn]) for turn in turns)


def _column_records(style: _Style, field: Field, values: Sequence[float]) -> list[bytes]:
    elements = [_element(style, field, value) for value in values]
    if not style.strays():
        return [record(field.number, _LENGTH, b"".join(elements))] if elements else []
    records = []
    while elements or style.rng.random() < 0.25:  # an empty piece is a piece too
        count = style.rng.randint(0, len(elements))
        piece, elements = elements[:count], elements[count:]
        if style.rng.random() < 0.5:
            records.append(record(field.number, _LENGTH, b"".join(piece), style.key_bytes()))
        else:
            records.extend(record(field.number, _native(field), element, style.key_bytes()) for element in piece)
    return records


def _native(field: Field) -> int:
    """Return the wire type of one value of a field."""
    if field.type == FieldDescriptor.TYPE_STRING:
        return _LENGTH
    return _FIXED[field.type][1] if field.type in _FIXED else _VARINT


def _element(style: _Style, field: Field, value: float | str) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if field.type in _FIXED:
        return struct.pack(_FIXED[field.type][0], value)
    number = int(value) % 2**64
    if not style.strays():
        return varint(number)
    if field.type == FieldDescriptor.TYPE_BOOL:
        number = style.rng.choice((1, 2, 2**32, 2**63)) if number else 0
    elif field.type in _NARROW and style.rng.random() < 0.2:
        number = number % 2**32 + (style.rng.choice((1, 2**31, 2**32 - 1)) << 32)  # readers take the low half
    return varint(number, style.rng.randint(0, _LONGEST_VARINT))


def _header_records(style: _Style, header: pb.BatchHeader) -> list[bytes]:
    """Return the header as one field or as two, in which the last value of each field counts."""
    fields: list[Field] = list(header.DESCRIPTOR.fields)
    other = pb.BatchHeader(worker_id="decoy", step_rows=9, kind=pb.BATCH_KIND_DRAFT, selection=True, dp_rank=2**32 - 1)
    decoys = [field for field in fields if style.strays(0.1)]
    spelt = {field.number for field, _ in header.ListFields()} | {field.number for field in decoys}
    lasting = style.rng.sample(fields, len(fields)) if style.strays() else fields
    scalars = [_scalar(style, field, other) for field in decoys]
    scalars += [_unknown(style, fields) for _ in range(2) if style.strays(0.25)]
    scalars += [_scalar(style, field, header) for field in lasting if field.number in spelt or style.strays(0.25)]
    cut = style.rng.randint(0, len(scalars)) if style.strays(0.5) else 0
    pieces = [scalars[:cut], scalars[cut:]] if cut else [scalars]
    return [record(1, _LENGTH, b"".join(piece), style.key_bytes()) for piece in pieces]


def _scalar(style: _Style, field: Field, header: pb.BatchHeader) -> bytes:
    return record(field.number, _native(field), _element(style, field, getattr(header, field.name)), style.key_bytes())


def _unknown(style: _Style, known: Sequence[Field], depth: int = 0) -> bytes:
    """Return a field that no reader knows: by its number, or by its wire type."""
    rng = style.rng
    number, wire_type = rng.choice((99, 100, 2**29 - 1)), rng.choice((0, 1, 2, 3, 5))
    field = rng.choice(known)
    if rng.random() < 0.5 and wire_type not in (_native(field), _LENGTH if field.is_repeated else None):
        number = field.number
    match wire_type:
        case 0:
            contents = varint(rng.choice((0, 1, 2**64 - 1)), rng.randint(0, _LONGEST_VARINT))
        case 3:
            inner = [_unknown(style, known, depth + 1) for _ in range(rng.randint(0, 2) if depth < 3 else 0)]
            contents = b"".join([*inner, varint(number << 3 | _END_GROUP)])
        case _:
            contents = b"\xff" * {_FIXED64: 8, _FIXED32: 4, _LENGTH: rng.choice((0, 3, 200))}[wire_type]
    return record(number, wire_type, contents, style.key_bytes())
