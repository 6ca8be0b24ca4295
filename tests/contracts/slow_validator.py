"""A second reader of the schema, plain and slow, to hold the codec against.

It shares nothing with the codec but the generated classes: the bounds come from the descriptor, and the rules
that join several fields are written here from the comments in logprob_batch.proto.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain, compress, pairwise, repeat
from operator import mul
from typing import Any, NamedTuple, cast

from google.protobuf.message import DecodeError, Message

from tokenbus_contracts.generated import bounds_pb2 as schema
from tokenbus_contracts.generated import logprob_batch_pb2 as pb

Descriptor = Any
"""The stubs know two kinds of descriptors, unrelated, and no options that a .proto declares."""

_LOGITS = (pb.VALUE_KIND_RAW_LOGITS, pb.VALUE_KIND_PROCESSED_LOGITS)


class Refusal(NamedTuple):
    """One broken rule: the field as the codec names it, and the rule's stable name."""

    field: str
    rule: str


def refusals(data: bytes) -> Iterator[Refusal]:
    """Yield every rule that the message breaks, as far as the lengths leave a meaning to the later ones."""
    if len(data) > _option(pb.LogprobBatch.DESCRIPTOR, schema.message_bounds).max_bytes:
        yield Refusal("message", "bytes")
        return
    try:
        message = pb.LogprobBatch.FromString(data)
    except DecodeError:
        yield Refusal("message", "malformed")
        return
    yield from _fields(message, "")
    if message.HasField("header"):
        yield from _header(message)
    yield from _columns(message)


def bounds_of(field: Descriptor) -> schema.FieldBounds:
    return cast(schema.FieldBounds, _option(field, schema.bounds))


def _option(descriptor: Descriptor, extension: Descriptor) -> Any:  # noqa: ANN401 - each has its own message
    return descriptor.GetOptions().Extensions[extension]


# What each field declares of itself.


def _fields(message: Message, prefix: str) -> Iterator[Refusal]:
    for field in message.DESCRIPTOR.fields:
        name = prefix + field.name
        value = getattr(message, field.name)
        rule = bounds_of(field)
        if field.is_repeated:
            if len(value) > rule.max_items:
                yield Refusal(name, "items")
            if rule.unique:
                yield from _unique(value, name)
            for index, element in enumerate(value):
                yield from _value(field, element, f"{name}[{index}]")
        elif field.message_type is None:
            yield from _value(field, value, name)
        elif message.HasField(field.name):
            yield from _fields(value, f"{name}.")
        elif rule.required:
            yield Refusal(name, "required")


def _value(field: Descriptor, value: float | str, name: str) -> Iterator[Refusal]:
    rule = bounds_of(field)
    if isinstance(value, str):
        size = len(value.encode())
        if size < rule.min_bytes:
            yield Refusal(name, "required")
        if rule.HasField("max_bytes") and size > rule.max_bytes:
            yield Refusal(name, "bytes")
        return
    if field.name == "schema_major":
        if not rule.min <= value <= rule.max:
            yield Refusal(name, "version")
        return
    if rule.finite and not math.isfinite(value):
        yield Refusal(name, "finite")
    if rule.named and value not in field.enum_type.values_by_number:
        yield Refusal(name, "named")
    if rule.HasField("min") and value < rule.min:
        yield Refusal(name, "min")
    if rule.HasField("max") and value > rule.max:
        yield Refusal(name, "max")


def _unique(values: Sequence[int], name: str) -> Iterator[Refusal]:
    seen = set()
    for index, value in enumerate(values):
        if value in seen:
            yield Refusal(f"{name}[{index}]", "unique")
        seen.add(value)


# What the comments say of fields together.


def _header(message: pb.LogprobBatch) -> Iterator[Refusal]:
    header = message.header
    rows = len(message.request_keys)
    if header.part_index >= header.part_count:
        yield Refusal("header.part_index", "max")
    if header.part_count == 1 and not header.selection:
        if header.step_rows != rows:
            yield Refusal("header.step_rows", "length")
    elif header.step_rows < rows:
        yield Refusal("header.step_rows", "min")
    if header.value_kind == pb.VALUE_KIND_UNSPECIFIED and any(
        scoring != pb.SCORING_NONE for scoring in message.scorings
    ):
        yield Refusal("header.value_kind", "scoring")
    yield from _above(message, ("batch_indices",), header.step_rows - 1)
    if header.kind == pb.BATCH_KIND_DRAFT:
        if header.draft_follows:
            yield Refusal("header.draft_follows", "kind")
        yield from _above(message, ("draft_token_counts", "proposal_counts"), 0, "kind")
    if header.vocabulary_size:
        ids = ("token_ids", "alternative_token_ids", "proposal_token_ids", "given_token_ids", "mask_token_ids")
        yield from _above(message, ids, header.vocabulary_size - 1)
        yield from _above(message, ("ranks", "top_ks", "mask_sizes"), header.vocabulary_size)
    if header.value_kind not in _LOGITS:
        yield from _above(message, ("logprobs", "alternative_logprobs", "other_logprobs", "given_logprobs"), 0)


def _above(message: pb.LogprobBatch, names: Sequence[str], most: int, rule: str = "max") -> Iterator[Refusal]:
    for name in names:
        for index, value in enumerate(getattr(message, name)):
            if value > most:
                yield Refusal(f"{name}[{index}]", rule)


def _columns(message: pb.LogprobBatch) -> Iterator[Refusal]:
    """Yield what the lengths, the rows and, where the lengths leave them one meaning, the tokens break."""
    wrong = list(_lengths(message, schema.COLUMN_LENGTH_ROWS, len(message.request_keys)))
    yield from wrong
    if wrong:
        return
    counts = list(zip(message.token_counts, message.scorings, message.top_ks, strict=True))
    demanded = {
        schema.COLUMN_LENGTH_TOKENS: sum(count for count, _, _ in counts),
        schema.COLUMN_LENGTH_SCORED_TOKENS: sum(count for count, scoring, _ in counts if scoring != pb.SCORING_NONE),
        schema.COLUMN_LENGTH_ALTERNATIVES: sum(count * top_k for count, _, top_k in counts),
        schema.COLUMN_LENGTH_PROPOSALS: sum(message.proposal_counts),
    }
    if message.stops:
        demanded[schema.COLUMN_LENGTH_STOPPED_ROWS] = list(message.statuses).count(pb.ROW_STATUS_FINISHED_STOP)
    for length, demand in demanded.items():
        wrong.extend(_lengths(message, length, demand))
    yield from wrong
    yield from _rows(message)
    if not wrong:
        yield from _tokens(message)
    yield from _extras(message)


def _extras(message: pb.LogprobBatch) -> Iterator[Refusal]:
    rows = len(message.request_keys)
    uneven = [
        refusal
        for refusal in _lengths(message, schema.COLUMN_LENGTH_ROWS_OR_NONE, rows)
        if len(getattr(message, refusal.field))
    ]
    yield from uneven
    if uneven:
        return
    extras, given, bounds = (
        column or [0] * rows for column in (message.extras, message.given_counts, message.mask_bounds)
    )
    told = _told_masks(message, bounds)
    demanded = {
        schema.COLUMN_LENGTH_OTHER_LOGPROBS: sum(compress(message.token_counts, (kinds & 1 for kinds in extras))),
        schema.COLUMN_LENGTH_ENTROPIES: sum(compress(message.token_counts, (kinds & 2 for kinds in extras))),
        schema.COLUMN_LENGTH_GIVEN_TOKENS: sum(given),
        schema.COLUMN_LENGTH_GIVEN_LOGPROBS: sum(map(mul, message.token_counts, given)),
        schema.COLUMN_LENGTH_MASKED_TOKENS: sum(compress(message.token_counts, bounds)),
        schema.COLUMN_LENGTH_MASK_TOKENS: sum(told),
    }
    wrong = [refusal for length, demand in demanded.items() for refusal in _lengths(message, length, demand)]
    yield from wrong
    if not wrong:
        yield from _masks(message, told)


def _told_masks(message: pb.LogprobBatch, bounds: Sequence[int]) -> list[int]:
    """Return how many ids each mask tells, as far as there are sizes."""
    counts = zip(bounds, message.token_counts, strict=True)
    each = chain.from_iterable(repeat(bound, count if bound else 0) for bound, count in counts)
    return [size if size <= bound else 0 for size, bound in zip(message.mask_sizes, each, strict=False)]


def _masks(message: pb.LogprobBatch, told: Sequence[int]) -> Iterator[Refusal]:
    first = 0
    for size in told:
        ids = message.mask_token_ids[first : first + size]
        for place, (before, after) in enumerate(pairwise(ids), first + 1):
            if after <= before:
                yield Refusal(f"mask_token_ids[{place}]", "order")
        first += size


def _lengths(message: pb.LogprobBatch, length: int, demanded: int) -> Iterator[Refusal]:
    for field in message.DESCRIPTOR.fields:
        if bounds_of(field).length == length and len(getattr(message, field.name)) != demanded:
            yield Refusal(field.name, "length")


def _rows(message: pb.LogprobBatch) -> Iterator[Refusal]:
    statuses = pb.RowStatus.DESCRIPTOR.values_by_number
    for row, status in enumerate(message.statuses):
        if status in statuses and status != pb.ROW_STATUS_UNSPECIFIED:
            rule = _option(statuses[status], schema.status_rule)
            count = message.token_counts[row]
            if (rule.tokens == schema.TOKEN_RULE_NONE and count) or (
                rule.tokens == schema.TOKEN_RULE_SOME and not count
            ):
                yield Refusal(f"token_counts[{row}]", "status")
            if message.proposal_counts[row] and not rule.proposals:
                yield Refusal(f"proposal_counts[{row}]", "status")
        if message.top_ks[row] and message.scorings[row] != pb.SCORING_FULL:
            yield Refusal(f"top_ks[{row}]", "scoring")
        scored = (pb.SCORING_NONE, pb.SCORING_SHED)
        for name, without in (("extras", scored[:1]), ("given_counts", scored), ("mask_bounds", scored)):
            column = getattr(message, name)
            if len(column) > row and column[row] and message.scorings[row] in without:
                yield Refusal(f"{name}[{row}]", "scoring")


class _Token(NamedTuple):
    """One token, its place among the scored ones, and its alternatives from the first one's place on."""

    id: int
    place: int
    first: int
    ids: Sequence[int]
    values: Sequence[float]


def _tokens(message: pb.LogprobBatch) -> Iterator[Refusal]:
    ids, values = message.alternative_token_ids, message.alternative_logprobs
    place = first = scored = 0
    for count, scoring, top_k in zip(message.token_counts, message.scorings, message.top_ks, strict=True):
        for _ in range(count):
            last = first + top_k
            token = _Token(message.token_ids[place], scored, first, ids[first:last], values[first:last])
            yield from _order(token)
            if scoring != pb.SCORING_NONE:
                yield from _agreement(token, message.logprobs[scored], message.ranks[scored])
                scored += 1
            place += 1
            first = last


def _order(token: _Token) -> Iterator[Refusal]:
    ranked = zip(token.values, token.ids, strict=True)
    for place, ((value, token_id), (after, after_id)) in enumerate(pairwise(ranked), token.first + 1):
        if after > value:
            yield Refusal(f"alternative_logprobs[{place}]", "order")
        if after == value and after_id <= token_id:
            yield Refusal(f"alternative_token_ids[{place}]", "order")


def _agreement(token: _Token, own: float, rank: int) -> Iterator[Refusal]:
    for place, (token_id, value) in enumerate(zip(token.ids, token.values, strict=True), token.first):
        if token_id == token.id and value != own:
            yield Refusal(f"alternative_logprobs[{place}]", "agreement")
    top_k = len(token.ids)
    if not top_k or not rank:
        return
    fits = token.values[rank - 1] == own if rank <= top_k else token.values[-1] >= own
    if not fits:
        yield Refusal(f"ranks[{token.place}]", "agreement")
