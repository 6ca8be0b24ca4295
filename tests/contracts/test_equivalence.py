"""The codec beside a slow reader of the same schema and beside the generated classes: all three must agree."""

import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contracts.one_break import BREAKS, changed, four_rows
from tests.contracts.other_encodings import record, varint
from tests.contracts.plain_rows import PlainRow, batch_of, plain_extras, plain_rows, values_of
from tests.contracts.slow_validator import Bounds, Refusal, refusals, verdict
from tests.contracts.strategies import (
    canonical,
    damaged,
    damaged_messages,
    mutated,
    mutated_messages,
    reencoded_messages,
    valid_messages,
)
from tests.contracts.valid_messages import Sizes, seeded, uniform_message, valid_message
from tests.support.campaigns import many
from tokenbus_contracts import BatchHeader, ContractError, Limits, LogprobBatch, Rule, decode, encode, native
from tokenbus_contracts.generated import logprob_batch_pb2 as pb

LIMITS = {Bounds.SCHEMA: Limits.schema(), Bounds.DEFAULT: Limits.default()}


def refusal_of(data: bytes, bounds: Bounds) -> Refusal | None:
    """Return what decode says of a message, in the slow validator's words."""
    try:
        decode(data, LIMITS[bounds])
    except ContractError as error:
        return Refusal(error.field, error.rule.value)
    return None


@contextmanager
def in_python() -> Iterator[None]:
    """Do without the compiled check: what it accepts, the checks in Python must accept too."""
    with mock.patch.object(native, "_accepts", None):
        yield


def assert_same_verdict(data: bytes) -> None:
    """Assert that decode refuses what the slow validator refuses, and for a reason that it finds too."""
    for bounds in Bounds:
        found = set(refusals(data, bounds))
        refused = refusal_of(data, bounds)
        assert (refused is None) == (not found), (bounds, refused, found)
        if refused is None:
            with in_python():
                assert refusal_of(data, bounds) is None
        else:
            assert refused in found or _is_same_reason(refused, found), (bounds, refused, found)


def _is_same_reason(refused: Refusal, found: set[Refusal]) -> bool:
    # decode says which field is damaged, unless it refused a column by its length before it came that far.
    return found == {Refusal("message", "malformed")} and refused.rule in ("malformed", "items")


@settings(max_examples=many(500, 100))
@given(valid_messages)
def test_what_keeps_the_contract_is_accepted_by_both(message: pb.LogprobBatch) -> None:
    data = canonical(message)
    assert verdict(data, Bounds.SCHEMA) is None
    assert_same_verdict(data)
    if native.available() and message.header.worker_id.isascii():
        # Python would accept it if the compiled check did not, and no test would see that it is slow.
        assert native.accepts(data, Limits.schema())


@settings(max_examples=many(600, 100))
@given(mutated_messages)
def test_changed_messages_get_the_same_verdict(data: bytes) -> None:
    assert_same_verdict(data)


@settings(max_examples=many(600, 100))
@given(damaged_messages)
def test_damaged_messages_get_the_same_verdict(data: bytes) -> None:
    """A message with changed bytes is accepted by both readers, or refused by both for the same reason."""
    assert_same_verdict(data)


@pytest.mark.parametrize(
    ("make", "rules"),
    [
        # All that a change of a value can break: only unreadable bytes, and too many of them, are missing.
        (mutated, set(Rule) - {Rule.TYPE, Rule.MALFORMED, Rule.ITEMS}),
        # Changed bytes seldom make one key or index another.
        (damaged, {Rule.MALFORMED, Rule.REQUIRED, Rule.LENGTH, Rule.MIN, Rule.MAX, Rule.AGREEMENT}),
    ],
)
def test_thousands_of_broken_messages_get_the_same_verdict(make: Callable[[Random], bytes], rules: set[Rule]) -> None:
    """Both readers agree far beyond what hypothesis has the time for, on all rules and on what survives."""
    names: Counter[str | None] = Counter()
    messages = many(10_000, 2000)
    for seed in range(messages):
        data = make(seeded(seed))
        assert_same_verdict(data)
        refused = refusal_of(data, Bounds.SCHEMA)
        names[refused.rule if refused else None] += 1
    assert rules <= names.keys()
    assert names[None] >= messages * 0.08


@settings(max_examples=many(600, 100))
@given(reencoded_messages)
def test_every_encoding_of_a_message_decodes_to_the_same_batch(pair: tuple[pb.LogprobBatch, bytes]) -> None:
    """Order, packing, padding, split headers and unknown fields change nothing that a reader gets."""
    message, data = pair
    assert_same_verdict(data)
    assert decode(data, Limits.schema()) == batch_of(message)
    with in_python():
        assert decode(data, Limits.schema()) == batch_of(message)


@settings(max_examples=many(400, 60))
@given(valid_messages)
def test_codec_and_generated_classes_write_the_same_bytes(message: pb.LogprobBatch) -> None:
    batch = batch_of(message)
    data = encode(batch, Limits.schema())
    assert data == canonical(message)
    read = pb.LogprobBatch.FromString(data)
    for name, column in values_of(read, 1).items():
        assert list(column) == getattr(batch, name).tolist() == list(getattr(message, name))
    assert BatchHeader(**values_of(read.header)) == batch.header
    assert decode(canonical(message), Limits.schema()) == batch


@settings(max_examples=many(400, 60))
@given(st.one_of(reencoded_messages.map(lambda pair: pair[1]), mutated_messages, damaged_messages))
def test_what_was_decoded_once_is_encoded_the_same_ever_after(data: bytes) -> None:
    """Whatever decode accepts, encode writes in one form, and that form comes back as it is."""
    try:
        batch = decode(data, Limits.schema())
    except ContractError:
        return
    once = encode(batch, Limits.schema())
    again = decode(once, Limits.schema())
    assert again == batch
    assert encode(again, Limits.schema()) == once
    assert once == canonical(_known(data))


def _known(data: bytes) -> pb.LogprobBatch:
    message = pb.LogprobBatch.FromString(data)
    message.DiscardUnknownFields()
    return message


def rows_of(batch: LogprobBatch) -> list[PlainRow]:
    """Return a batch's rows by what the generated class reads of its bytes."""
    return list(plain_rows(pb.LogprobBatch.FromString(encode(batch, Limits.schema()))))


@settings(max_examples=many(300, 60))
@given(valid_messages)
def test_in_batch_order_moves_every_column_together(message: pb.LogprobBatch) -> None:
    ordered = decode(canonical(message), Limits.schema()).in_batch_order()
    assert rows_of(ordered) == sorted(plain_rows(message), key=lambda row: row.batch_index)
    assert ordered.header == batch_of(message).header


@settings(max_examples=many(300, 60))
@given(valid_messages, st.randoms(use_true_random=False))
def test_select_moves_every_column_together(message: pb.LogprobBatch, rng: Random) -> None:
    places = rng.sample(range(len(message.request_keys)), rng.randint(0, len(message.request_keys)))
    selected = decode(canonical(message), Limits.schema()).select(places)
    rows = list(plain_rows(message))
    assert rows_of(selected) == [rows[place] for place in places]
    assert selected.header == batch_of(message).header._replace(selection=True)


@settings(max_examples=many(300, 60))
@given(valid_messages)
def test_row_holds_its_slices_of_the_columns(message: pb.LogprobBatch) -> None:
    batch = decode(canonical(message), Limits.schema())
    for row, expected in zip(batch.rows(), plain_rows(message), strict=True):
        plain = (value.tolist() if isinstance(value, np.ndarray) else value for value in row[:-1])
        assert (*plain, plain_extras(row.extras)) == expected
    for place in range(batch.row_count):
        shape = (message.token_counts[place], message.top_ks[place])
        assert batch.row(place).alternative_token_ids.shape == shape
        assert batch.row(place).alternative_logprobs.shape == shape


@pytest.mark.parametrize("seed", range(3))
def test_large_messages_get_the_same_treatment(seed: int) -> None:
    """What holds of a few rows holds of hundreds: the same bytes, the same batch, the same order."""
    message = valid_message(seeded(seed), Sizes(rows=600, tokens=16, top_k=127 if seed else 0))
    data = canonical(message)
    assert_same_verdict(data)
    batch = decode(data, Limits.schema())
    assert batch == batch_of(message)
    assert encode(batch, Limits.schema()) == data
    assert rows_of(batch.in_batch_order()) == sorted(plain_rows(message), key=lambda row: row.batch_index)


@pytest.mark.parametrize(("path", "value", "rule"), BREAKS)
def test_one_broken_rule_has_one_name(path: str, value: object, rule: str) -> None:
    data = changed(path, value)
    assert {refusal.rule for refusal in refusals(data, Bounds.SCHEMA)} == {rule}
    assert_same_verdict(data)


@pytest.mark.parametrize(
    ("bounds", "most", "field"),
    [
        (Bounds.DEFAULT, {"rows": 512}, "request_keys"),
        (Bounds.DEFAULT, {"tokens": 8}, "token_counts[0]"),
        (Bounds.DEFAULT, {"drafts": 8}, "draft_token_counts[0]"),
        (Bounds.DEFAULT, {"top_k": 20}, "top_ks[0]"),
        (Bounds.SCHEMA, {"rows": 1024}, "request_keys"),
        (Bounds.SCHEMA, {"tokens": 16}, "token_counts[0]"),
        (Bounds.SCHEMA, {"drafts": 16}, "draft_token_counts[0]"),
        (Bounds.SCHEMA, {"top_k": 127}, "top_ks[0]"),
        (Bounds.DEFAULT, {"given": 128}, "given_counts[0]"),
        (Bounds.SCHEMA, {"given": 128}, "given_counts[0]"),
        (Bounds.SCHEMA, {"mask": 1024}, "mask_bounds[0]"),
    ],
)
def test_both_accept_the_most_and_refuse_one_more(bounds: Bounds, most: dict[str, int], field: str) -> None:
    sizes = {"rows": 1, **most}
    more = {**sizes, **{name: size + 1 for name, size in most.items()}}
    accepted, refused = canonical(uniform_message(**sizes)), canonical(uniform_message(**more))
    assert_same_verdict(accepted)
    assert_same_verdict(refused)
    assert refusal_of(accepted, bounds) is None
    assert refusal_of(refused, bounds) == Refusal(field, "items" if "rows" in most else "max")


@pytest.mark.parametrize(("bounds", "most"), [(Bounds.DEFAULT, 2 * 2**20), (Bounds.SCHEMA, 8 * 2**20)])
def test_both_accept_the_most_bytes_and_refuse_one_more(bounds: Bounds, most: int) -> None:
    data = canonical(uniform_message(1))
    padding = most - len(data) - len(record(100, 2, b"", 5))
    for length, expected in ((padding, None), (padding + 1, Refusal("message", "bytes"))):
        padded = data + record(100, 2, bytes(length), 5)
        assert len(padded) - most == (expected is not None)
        assert verdict(padded, bounds) == refusal_of(padded, bounds) == expected


@pytest.mark.parametrize("size", range(1, 13))
@pytest.mark.parametrize("part", ["header's key", "header's length", "column's key", "column's length", "field's key"])
def test_both_stop_at_the_same_padding(part: str, size: int) -> None:
    """A key or a length that is padded is read as far as the generated classes read it, and no further."""
    whose, what = part.split("'s ")
    message = uniform_message(2)
    major, *others = message.header.SerializeToString()
    keys = struct.pack("<2Q", *message.request_keys)
    message.ClearField("header")
    message.ClearField("request_keys")
    data = canonical(message)
    header = varint(major, size if whose == "field" else 0) + bytes(others)
    for name, number, contents in (("column", 2, keys), ("header", 1, header)):
        key = varint(number << 3 | 2, size if (name, what) == (whose, "key") else 0)
        length = varint(len(contents), size if (name, what) == (whose, "length") else 0)
        data = key + length + contents + data
    assert_same_verdict(data)


@pytest.mark.parametrize("extra", [1, 3])
@pytest.mark.parametrize("name", [field.name for field in pb.LogprobBatch.DESCRIPTOR.fields[1:]])
def test_both_refuse_part_of_an_element(name: str, extra: int) -> None:
    """A column that ends within an element, or behind a varint's beginning, is no column at all."""
    message = four_rows()
    pieces = []
    for field in message.DESCRIPTOR.fields:
        values = getattr(message, field.name)
        piece = pb.LogprobBatch(**{field.name: values}).SerializeToString()
        if field.name == name:
            contents = piece[len(record(field.number, 2, b"")) :]
            piece = record(field.number, 2, contents + b"\x80" * extra)
        pieces.append(piece)
    data = b"".join(pieces)
    assert_same_verdict(data)
    assert refusal_of(data, Bounds.SCHEMA) is not None


@pytest.mark.parametrize("depth", range(95, 105))
@pytest.mark.parametrize("within", ["header", "message"])
def test_both_stop_at_the_same_depth(within: str, depth: int) -> None:
    """Unknown groups within each other are read as deep as the generated classes read them, and no deeper."""
    groups = varint(100 << 3 | 3) * depth + varint(100 << 3 | 4) * depth
    message = uniform_message(1)
    header = message.header.SerializeToString()
    message.ClearField("header")
    inner, outer = (groups, b"") if within == "header" else (b"", groups)
    assert_same_verdict(record(1, 2, header + inner) + canonical(message) + outer)


@settings(max_examples=many(300, 60))
@given(valid_messages, st.randoms(use_true_random=False))
def test_between_cuts_every_column_of_a_token_together(message: pb.LogprobBatch, rng: Random) -> None:
    """Of each row the tokens that were asked for are left, with their logprobs, ranks and alternatives (case 13)."""
    begins = [
        rng.randrange(max(count, 1)) if position < 2**31 - 16 else 0
        for count, position in zip(message.token_counts, message.positions, strict=True)
    ]
    ends = [
        rng.randint(min(begin + 1, count), count) for begin, count in zip(begins, message.token_counts, strict=True)
    ]
    places = list(zip(begins, ends, strict=True))
    batch = decode(canonical(message), Limits.schema())
    cut = batch.between(begins, ends)
    expected = []
    for row, (begin, end) in zip(plain_rows(message), places, strict=True):
        scored = slice(begin, end) if row.logprobs else slice(0)
        expected.append(
            row._replace(
                position=row.position + begin,
                token_ids=row.token_ids[begin:end],
                logprobs=row.logprobs[scored],
                ranks=row.ranks[scored],
                alternative_token_ids=row.alternative_token_ids[begin:end],
                alternative_logprobs=row.alternative_logprobs[begin:end],
                extras=row.extras and row.extras.between(begin, end),
            )
        )
    assert rows_of(cut) == expected
    assert cut.header == batch.header


@settings(max_examples=many(300, 60))
@given(valid_messages, st.randoms(use_true_random=False))
def test_parts_join_to_the_step_in_batch_order(message: pb.LogprobBatch, rng: Random) -> None:
    """A step that was taken apart at random comes together again as the whole step in batch order."""
    batch = decode(canonical(message), Limits.schema())
    owners = [rng.randrange(3) for _ in range(batch.row_count)]
    parts = [batch.select([row for row, owner in enumerate(owners) if owner == part]) for part in range(3)]
    assert rows_of(LogprobBatch.joined(parts)) == rows_of(batch.in_batch_order())
