"""The columns of LogprobBatch and the bounds of every message, read from the descriptor.

Only this module reads the schema's options. All bounds that other modules enforce come from here.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import EnumValueOptions, FieldOptions, MessageOptions
from google.protobuf.internal import api_implementation

from tokenbus_contracts.generated import bounds_pb2, logprob_batch_pb2

MAJOR = 1
MINOR = 0

# In the type stubs, DESCRIPTOR has a union type. At run time, DESCRIPTOR is always a Descriptor.
BATCH = cast("Descriptor", logprob_batch_pb2.LogprobBatch.DESCRIPTOR)
HEADER = cast("Descriptor", logprob_batch_pb2.BatchHeader.DESCRIPTOR)

ONE_BYTE_VARINT_END = 128
"""A packed value below 128 takes one byte, so a column of such values is an array of bytes."""

_WIRE_VARINT_MAX_BYTES = 10
DTYPES: dict[int, np.dtype[Any]] = {
    FieldDescriptor.TYPE_FIXED64: np.dtype("<u8"),
    FieldDescriptor.TYPE_FIXED32: np.dtype("<u4"),
    FieldDescriptor.TYPE_FLOAT: np.dtype("<f4"),
    FieldDescriptor.TYPE_UINT32: np.dtype("u1"),
    FieldDescriptor.TYPE_ENUM: np.dtype("u1"),
}
"""The array type of a column, by the type of its field."""


_IMPLEMENTATION = api_implementation.Type()


def check_implementation() -> None:
    """Raise ImportError if protobuf's pure Python implementation is active, which must not read foreign messages.

    The pure Python implementation reads some encodings differently, and takes seconds for some messages. FastDeploy
    starts its workers with this implementation, which is safe because both implementations write the same bytes.
    """
    if _IMPLEMENTATION != "upb":
        raise ImportError(
            f"tokenbus needs protobuf's compiled implementation, upb; this process uses {_IMPLEMENTATION!r} "
            "(is PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION set?)"
        )


@dataclass(frozen=True)
class Column:
    """One column, with its name, type, key on the wire and bounds."""

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
    """Whether a value without a name in the enum is invalid."""

    @cached_property
    def max_wire_items(self) -> int:
        """The maximum number of items on the wire: `max_items` or, for a varint column, the maximum size in bytes."""
        return self.max_items * (_WIRE_VARINT_MAX_BYTES if self.item_bytes == 1 else 1)

    @cached_property
    def empty(self) -> npt.NDArray[np.generic]:
        return np.frombuffer(b"", self.dtype)


@dataclass(frozen=True)
class FieldRule:
    """The schema's rules for one field of a message."""

    field: FieldDescriptor
    bounds: bounds_pb2.FieldBounds
    min: int | None
    max: int | None

    @property
    def name(self) -> str:
        return self.field.name

    @property
    def is_text(self) -> bool:
        return self.field.type == FieldDescriptor.TYPE_STRING


def fields_of(message: Descriptor) -> list[FieldDescriptor]:
    """Return a message's fields in the order of their numbers, which is their order on the wire."""
    return cast("list[FieldDescriptor]", sorted(message.fields, key=lambda field: field.number))


def bounds_in(options: FieldOptions) -> bounds_pb2.FieldBounds:
    return options.Extensions[bounds_pb2.bounds]  # type: ignore[index]


def message_bounds_in(options: MessageOptions) -> bounds_pb2.MessageBounds:
    return options.Extensions[bounds_pb2.message_bounds]  # type: ignore[index]


def status_rule_in(options: EnumValueOptions) -> bounds_pb2.StatusRule:
    return options.Extensions[bounds_pb2.status_rule]  # type: ignore[index]


def _rule(field: FieldDescriptor) -> FieldRule:
    bounds = bounds_in(field.GetOptions())
    least = bounds.min if bounds.HasField("min") else 0 if bounds.named else None
    most = max(value.number for value in field.enum_type.values) if bounds.named and field.enum_type else None
    return FieldRule(
        field,
        bounds,
        min=bounds.least if bounds.HasField("least") else least,
        max=bounds.max if bounds.HasField("max") else most,
    )


def _range(rule: FieldRule) -> tuple[int, int]:
    """Return a field's valid range, according to its bounds, its enum or its type."""
    wide = (FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_BOOL)
    highest = 2**64 - 1 if rule.field.type in wide else 2**32 - 1
    return rule.min or 0, highest if rule.max is None else rule.max


def _packed_key(field: FieldDescriptor) -> int:
    """Return a packed field's key on the wire, made of its number and wire type 2."""
    return field.number << 3 | 2


def _column(field: FieldDescriptor) -> Column:
    rule = _rule(field)
    bounds, (low, high) = rule.bounds, _range(rule)
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
"""The columns in the order of their fields, which is their order on the wire."""

COLUMN: dict[str, Column] = {column.name: column for column in COLUMNS}

_EXTRAS_FROM = COLUMN["extras"].key
BASE_COLUMNS = tuple(column for column in COLUMNS if column.key < _EXTRAS_FROM)
"""The columns that every batch may have."""
EXTRA_COLUMNS = tuple(column for column in COLUMNS if column.key >= _EXTRAS_FROM)
"""The additional columns of a batch in which a row has extras."""

NO_COLUMNS: dict[str, npt.NDArray[Any]] = {column.name: column.empty for column in BASE_COLUMNS}
"""The empty base columns. A reader replaces each column that it finds in a message."""

HEADER_KEY = _packed_key(BATCH.fields_by_name["header"])

MESSAGE_BOUNDS = message_bounds_in(BATCH.GetOptions())


_STATUSES = {
    value.number: status_rule_in(value.GetOptions()) for value in logprob_batch_pb2.RowStatus.DESCRIPTOR.values
}
STATUS_RULES = {number: rule for number, rule in _STATUSES.items() if rule.tokens}
"""The rule of each valid status. A status without a rule is invalid."""


@cache
def rules_of(message: Descriptor) -> list[FieldRule]:
    """Return the schema's rules for a message's fields, in the order of their numbers."""
    return [_rule(field) for field in fields_of(message)]


HEADER_RULES: dict[str, FieldRule] = {
    rule.name: replace(rule, min=low, max=high) for rule in rules_of(HEADER) for low, high in [_range(rule)]
}
"""The schema's rules for the header's fields. A number without a bound has the range of its type."""


@cache
def oneofs_of(message: Descriptor) -> dict[str, list[str]]:
    """Return the fields of each oneof, without the oneofs that protoc creates for optional fields."""
    return {
        oneof.name: [field.name for field in oneof.fields]
        for oneof in message.oneofs
        if oneof.name != f"_{oneof.fields[0].name}"
    }


def max_bytes_of(message: Descriptor) -> int:
    """Return the maximum size of an encoded message in bytes, or zero if only its enclosing message has a bound."""
    return message_bounds_in(message.GetOptions()).max_bytes
