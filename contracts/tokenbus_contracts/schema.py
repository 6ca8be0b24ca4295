"""The columns of LogprobBatch and the bounds of every message, read from the descriptor.

Only this module reads the schema's options; all bounds that other modules enforce come from here.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import EnumValueOptions, FieldOptions, MessageOptions
from google.protobuf.internal import api_implementation

from tokenbus_contracts.generated import bounds_pb2, logprob_batch_pb2

MAJOR = 1
MINOR = 0

# Both of protobuf's implementations have descriptors like this one; the type stubs name the union of both.
BATCH = cast("Descriptor", logprob_batch_pb2.LogprobBatch.DESCRIPTOR)
HEADER = cast("Descriptor", logprob_batch_pb2.BatchHeader.DESCRIPTOR)

ONE_BYTE_VARINT_END = 128
"""Packed values below this take one byte each, so a column of such values is an array of bytes."""

_WIRE_VARINT_MAX_BYTES = 10
DTYPES: dict[int, np.dtype[Any]] = {
    FieldDescriptor.TYPE_FIXED64: np.dtype("<u8"),
    FieldDescriptor.TYPE_FIXED32: np.dtype("<u4"),
    FieldDescriptor.TYPE_FLOAT: np.dtype("<f4"),
    FieldDescriptor.TYPE_UINT32: np.dtype("u1"),
    FieldDescriptor.TYPE_ENUM: np.dtype("u1"),
}
"""The array type of a column, by its field's type."""


_IMPLEMENTATION = api_implementation.Type()


def check_implementation() -> None:
    """Raise ImportError if messages of other processes would be read by protobuf's pure Python implementation.

    It reads some encodings differently, and needs seconds for some messages. It writes the same bytes, so a worker may
    use it: FastDeploy starts its workers with it.
    """
    if _IMPLEMENTATION != "upb":
        raise ImportError(
            f"tokenbus needs protobuf's compiled implementation, upb; this process uses {_IMPLEMENTATION!r} "
            "(is PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION set?)"
        )


@dataclass(frozen=True)
class Column:
    """One column: its name, type, key on the wire and bounds."""

    name: str
    dtype: np.dtype[np.generic]
    item_bytes: int
    key: int
    length: int
    max_items: int
    min: int
    max: int
    default_max: int
    default_max_items: int
    named: bool
    """Whether only named values of the enum are valid."""

    @cached_property
    def max_wire_items(self) -> int:
        """`max_items`; for a varint column, the maximum size in bytes of this many elements."""
        return self.max_items * (_WIRE_VARINT_MAX_BYTES if self.item_bytes == 1 else 1)

    @cached_property
    def empty(self) -> npt.NDArray[np.generic]:
        """An empty array of the column's type."""
        return np.frombuffer(b"", self.dtype)


@dataclass(frozen=True)
class FieldRule:
    """The schema's rules for one field of a message."""

    name: str
    repeated: bool
    has_presence: bool
    """Whether the field distinguishes absent from zero."""
    message: Descriptor | None
    """The type of a message field."""
    is_text: bool
    is_bytes: bool
    is_unsigned: bool
    min: int | None
    max: int | None
    named: bool
    finite: bool
    unique: bool
    required: bool
    max_items: int | None
    min_bytes: int
    max_bytes: int | None


def fields_of(message: Descriptor) -> list[FieldDescriptor]:
    """Return a message's fields by number, which is their order on the wire."""
    return cast("list[FieldDescriptor]", sorted(message.fields, key=lambda field: field.number))


def bounds_in(options: FieldOptions) -> bounds_pb2.FieldBounds:
    return options.Extensions[bounds_pb2.bounds]  # type: ignore[index]


def message_bounds_in(options: MessageOptions) -> bounds_pb2.MessageBounds:
    return options.Extensions[bounds_pb2.message_bounds]  # type: ignore[index]


def status_rule_in(options: EnumValueOptions) -> bounds_pb2.StatusRule:
    return options.Extensions[bounds_pb2.status_rule]  # type: ignore[index]


def _enum_of(field: FieldDescriptor) -> EnumDescriptor:
    if field.enum_type is None:
        raise TypeError(f"{field.full_name} is not an enum")
    return field.enum_type


def _range(field: FieldDescriptor) -> tuple[int, int]:
    """Return a field's valid range, from its bounds, its enum or its type."""
    bounds = bounds_in(field.GetOptions())
    low = bounds.min if bounds.HasField("min") else 0
    if bounds.HasField("max"):
        return low, bounds.max
    if bounds.named:
        return low, max(value.number for value in _enum_of(field).values)
    wide = field.type in (FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_BOOL)
    return low, 2**64 - 1 if wide else 2**32 - 1


def _packed_key(field: FieldDescriptor) -> int:
    """Return a packed field's key on the wire: its number and wire type 2."""
    return field.number << 3 | 2


def _column(field: FieldDescriptor) -> Column:
    bounds = bounds_in(field.GetOptions())
    low, high = _range(field)
    return Column(
        name=field.name,
        dtype=DTYPES[field.type],
        item_bytes=DTYPES[field.type].itemsize,
        key=_packed_key(field),
        length=bounds.length,
        max_items=bounds.max_items,
        min=low,
        max=high,
        default_max=bounds.default_max if bounds.HasField("default_max") else high,
        default_max_items=bounds.default_max_items or bounds.max_items,
        named=bounds.named,
    )


COLUMNS: tuple[Column, ...] = tuple(
    _column(field) for field in fields_of(BATCH) if bounds_in(field.GetOptions()).length
)
"""The columns in field order, which is their order on the wire."""

COLUMN: dict[str, Column] = {column.name: column for column in COLUMNS}

_EXTRAS_FROM = COLUMN["extras"].key
BASE_COLUMNS = tuple(column for column in COLUMNS if column.key < _EXTRAS_FROM)
"""The columns of every batch."""
EXTRA_COLUMNS = tuple(column for column in COLUMNS if column.key >= _EXTRAS_FROM)
"""The columns of a batch in which some row has extras."""

NO_COLUMNS: dict[str, npt.NDArray[Any]] = {column.name: column.empty for column in BASE_COLUMNS}
"""The base columns without elements, from which a reader starts."""

HEADER_KEY = next(_packed_key(field) for field in fields_of(BATCH) if field.name == "header")

MESSAGE_BOUNDS = message_bounds_in(BATCH.GetOptions())


def _status_rules() -> dict[int, bounds_pb2.StatusRule]:
    values = next(_enum_of(field).values for field in fields_of(BATCH) if field.name == "statuses")
    rules = {value.number: status_rule_in(value.GetOptions()) for value in values}
    return {number: rule for number, rule in rules.items() if rule.tokens}


STATUS_RULES = _status_rules()
"""The rule of each status; a status without a rule is invalid."""


@cache
def rules_of(message: Descriptor) -> list[FieldRule]:
    """Return the schema's rules for a message's fields, by number."""
    return [_field_rule(field) for field in fields_of(message)]


def _field_rule(field: FieldDescriptor) -> FieldRule:
    bounds = bounds_in(field.GetOptions())
    names_end = max((value.number for value in field.enum_type.values), default=0) if field.enum_type else None
    return FieldRule(
        name=field.name,
        repeated=field.is_repeated,
        has_presence=field.has_presence,
        message=field.message_type,
        is_text=field.type == FieldDescriptor.TYPE_STRING,
        is_bytes=field.type == FieldDescriptor.TYPE_BYTES,
        is_unsigned=field.cpp_type in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64),
        min=_least(bounds),
        max=bounds.max if bounds.HasField("max") else names_end if bounds.named else None,
        named=bounds.named,
        finite=bounds.finite,
        unique=bounds.unique,
        required=bounds.required,
        max_items=bounds.max_items if bounds.HasField("max_items") else None,
        min_bytes=bounds.min_bytes,
        max_bytes=bounds.max_bytes if bounds.HasField("max_bytes") else None,
    )


def _least(bounds: bounds_pb2.FieldBounds) -> int | None:
    """Return the smallest valid value in a field's bounds; None: its type bounds it."""
    if bounds.HasField("least"):
        return bounds.least
    return bounds.min if bounds.HasField("min") else 0 if bounds.named else None


HEADER_RULES: dict[str, FieldRule] = {
    field.name: replace(_field_rule(field), min=low, max=high)
    for field in fields_of(HEADER)
    for low, high in [_range(field)]
}
"""The schema's rules for the header's fields; a number without a bound has its type's range."""


@cache
def oneofs_of(message: Descriptor) -> dict[str, list[str]]:
    """Return the fields of each oneof, without the oneofs that protoc makes for optional fields."""
    return {
        oneof.name: [field.name for field in oneof.fields]
        for oneof in message.oneofs
        if oneof.name != f"_{oneof.fields[0].name}"
    }


def max_bytes_of(message: Descriptor) -> int:
    """Return the maximum size in bytes of an encoded message; zero: only the message that contains it has a bound."""
    return message_bounds_in(message.GetOptions()).max_bytes
