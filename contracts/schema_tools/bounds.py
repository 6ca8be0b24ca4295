"""Checks the options that declare bounds in the schema, because buf does not check them."""

import math
from collections import defaultdict
from collections.abc import Iterator

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet
from google.protobuf.message import Message as ProtobufMessage

from schema_tools.compiled import Tree, baseline
from tokenbus_contracts.generated.bounds_pb2 import ColumnLength
from tokenbus_contracts.published.descriptors import Message, Schema
from tokenbus_contracts.schema import status_rule_in

_LENGTH_NEEDED = (FieldDescriptorProto.TYPE_STRING, FieldDescriptorProto.TYPE_BYTES)
_ONE_BYTE = 127

# Groups of fields that must have the same bound. The first field of a group defines the bound.
_SAME = [
    *(
        ["LogprobBatch.token_ids.max", f"{field}.max"]
        for field in (
            *("LogprobBatch.alternative_token_ids", "LogprobBatch.proposal_token_ids"),
            *("TokenPrompt.token_ids", "SamplingParameters.stop_token_ids", "SamplingParameters.allowed_token_ids"),
            "TokenBias.token_id",
        )
    ),
    *(["LogprobBatch.draft_token_counts." + m, "LogprobBatch.proposal_counts." + m] for m in ("max", "default_max")),
    ["LogprobBatch.draft_token_counts.max", "StreamLimits.max_draft_tokens_per_row.max"],
    ["LogprobBatch.token_counts.max", "StreamLimits.max_tokens_per_row.max"],
    ["LogprobBatch.request_ids.max_items", "StreamLimits.max_rows.max"],
    ["LogprobBatch.top_ks.max", "StreamLimits.max_top_k.max", "Generate.top_logprobs.max"],
    ["LogprobBatch.top_ks.default_max", "Generate.top_logprobs.default_max"],
    ["LogprobBatch.max_bytes", "StreamLimits.max_message_bytes.max", "Item.payload_bytes.max"],
    [f"{message}.worker_id.max_bytes" for message in ("BatchHeader", "Hello", "Admitted", "Watch")],
]
# Columns of equal length have the same maximum number of elements.
_SAME_LENGTH: dict[int, int] = {
    ColumnLength.COLUMN_LENGTH_STOPPED_ROWS: ColumnLength.COLUMN_LENGTH_ROWS,
    ColumnLength.COLUMN_LENGTH_SCORED_TOKENS: ColumnLength.COLUMN_LENGTH_TOKENS,
}

# Bounds that must be products of other bounds.
_PRODUCTS = [
    ("LogprobBatch.token_ids.max_items", ("LogprobBatch.request_ids.max_items", "LogprobBatch.token_counts.max")),
    ("LogprobBatch.alternative_token_ids.max_items", ("LogprobBatch.token_ids.max_items", "LogprobBatch.top_ks.max")),
    (
        "LogprobBatch.proposal_token_ids.max_items",
        ("LogprobBatch.request_ids.max_items", "LogprobBatch.proposal_counts.max"),
    ),
    ("BatchHeader.step_rows.max", ("LogprobBatch.request_ids.max_items", "BatchHeader.part_count.max")),
]


def bound_faults(tree: Tree) -> Iterator[str]:
    """Yield a line for each bound that is missing, contradicts another bound, or differs from the released bound."""
    schema = Schema(FileDescriptorSet(file=tree.compiled))
    now = dict(_declared(schema))
    for message in schema.messages.values():
        yield from _missing(message)
    for enum in schema.enums.values():
        numbers = [value.number for value, _ in enum.values]
        if numbers != list(range(len(numbers))):
            yield f"{enum.name}: its numbers have gaps, but only ranges of numbers are checked: {numbers}"
    yield from _contradictions(
        {f"{name}.{bound}": value for name, bounds in now.items() for bound, value in bounds.items()},
        [*_SAME, *_same_length(now)],
    )
    for name, released in _declared(Schema(FileDescriptorSet(file=baseline(tree)))):
        # buf already reports removed fields.
        yield from _changed(name, released, now.get(name, released))


def _changed(name: str, released: dict[str, int], now: dict[str, int]) -> Iterator[str]:
    """Yield a line for each bound that was added, removed or changed since the last release."""
    for bound in sorted(released.keys() | now.keys()):
        was, value = released.get(bound), now.get(bound)
        if was is None:
            yield f"{name}.{bound}: {value} is in the schema, and {name} was released without such a bound"
        elif value is None:
            yield f"{name}.{bound}: {was} was released, and the schema has no such bound"
        elif was != value:
            yield f"{name}.{bound}: {was} was released, {value} is in the schema; a bound holds for a whole major"


def _declared(schema: Schema) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield every message, field and enum value of the schema with its bounds, which may be empty."""
    for message in schema.messages.values():
        yield message.name, _set_in(message.bounds)
        yield from ((f"{message.name}.{field.proto.name}", _set_in(field.bounds)) for field in message.fields)
    for enum in schema.enums.values():
        yield from ((value.name, _set_in(status_rule_in(value.options))) for value, _ in enum.values)


def _set_in(bounds: ProtobufMessage) -> dict[str, int]:
    return {bound.name: int(value) for bound, value in bounds.ListFields()}


def _missing(message: Message) -> Iterator[str]:
    for field in message.fields:
        name, kind, bounds = f"{message.name}.{field.proto.name}", field.proto.type, field.bounds
        if field.is_repeated and not bounds.max_items:
            yield f"{name}: repeated without max_items"
        if kind in _LENGTH_NEEDED and not bounds.max_bytes:
            yield f"{name}: text or bytes without max_bytes"
        if bounds.HasField("default_max") and bounds.default_max > bounds.max:
            yield f"{name}: default_max {bounds.default_max} above max {bounds.max}"
        if bounds.HasField("least") and bounds.HasField("min"):
            yield f"{name}: least {bounds.least} with min {bounds.min}, but they mean the same"
        if bounds.default_max_items > bounds.max_items:
            yield f"{name}: default_max_items above max_items {bounds.max_items}"
        counted = bounds.length and kind == FieldDescriptorProto.TYPE_UINT32
        if counted and not (bounds.HasField("max") and bounds.max <= _ONE_BYTE):
            yield f"{name}: a column of counts must stay at or below {_ONE_BYTE}, so that each count takes one byte"


def _same_length(now: dict[str, dict[str, int]]) -> Iterator[list[str]]:
    """Yield groups of names: the bounds of a group must be equal, because their columns have equal lengths."""
    columns = defaultdict(list)
    for name, bounds in now.items():
        if length := bounds.get("length"):
            columns[_SAME_LENGTH.get(length, length)].append(name)
    for names in columns.values():
        yield from ([f"{name}.{bound}" for name in names] for bound in ("max_items", "default_max_items"))


def _contradictions(now: dict[str, int], same: list[list[str]]) -> Iterator[str]:
    for first, *others in same:
        for other in others:
            if now.get(first) != now.get(other):
                yield f"{other}: {now.get(other)}, but {first} is {now.get(first)}; both must be the same bound"
    for product, factors in _PRODUCTS:
        expected = math.prod(now.get(factor, 0) for factor in factors)
        if now.get(product) != expected:
            yield f"{product}: {now.get(product)}, but {factors[0]} times {factors[1]} is {expected}"
