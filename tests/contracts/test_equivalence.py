"""The compiled code, the code in numpy and the generated classes, beside each other: all three must agree."""

import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from tests.contracts.broken_messages import damaged, mutated
from tests.contracts.other_encodings import record, reencoded, varint
from tests.contracts.plain_rows import batch_of, between, plain_extras, plain_rows, values_of
from tests.contracts.test_vectors import vector
from tests.contracts.valid_messages import Sizes, canonical, seeded, valid_message
from tests.support.campaigns import many
from tokenbus_contracts import BatchHeader, ContractError, Limits, LogprobBatch, Row, Rule, decode, encode, native
from tokenbus_contracts.generated import logprob_batch_pb2 as pb
from tokenbus_contracts.schema import COLUMN

SCHEMA = Limits.schema()


def verdict(data: bytes) -> tuple[str, Rule] | None:
    """Return what decode says of a message: the field and the rule of its refusal, or None.

    The value that it names has to break the limit that it names: another place would be the wrong one.
    """
    try:
        decode(data, SCHEMA)
    except ContractError as error:
        refused = error
    else:
        return None
    limit: Any = refused.limit
    actual: Any = refused.actual
    match refused.rule:
        case Rule.MIN:
            assert actual < limit, refused
        case Rule.MAX:
            assert actual > limit, refused
        case Rule.KIND:
            assert actual, refused
    return refused.field, refused.rule


@contextmanager
def in_python() -> Iterator[None]:
    """Do without the compiled check: what it accepts, the checks in Python must accept too."""
    with mock.patch.object(native, "_accepts", None):
        yield


def assert_read_as_protobuf_reads_it(data: bytes) -> Rule | None:
    """Assert that decode reads a message as the generated class does, and no further; return the rule that it breaks.

    The limits of a deployment are another number for the same code: test_limits.py has them.
    """
    found = verdict(data)
    try:
        known = pb.LogprobBatch.FromString(data)
    except DecodeError:
        # decode says which field is damaged, unless it refused a column by its length before it came that far.
        assert found is not None
        assert found[1] in {Rule.MALFORMED, Rule.ITEMS}
        return found[1]
    known.DiscardUnknownFields()
    once = canonical(known)
    assert verdict(once) == found
    with in_python():
        assert verdict(data) == verdict(once) == found
    if native.available() and known.header.worker_id.isascii():
        # Python would accept it if the compiled check did not, and no test would see that it is slow.
        assert native.accepts(once, SCHEMA) == (found is None)
    if found is not None:
        return found[1]
    batch = decode(data, SCHEMA)
    assert decode(once, SCHEMA) == batch
    assert encode(batch, SCHEMA) == once
    return None


@pytest.mark.parametrize("make", [mutated, damaged])
def test_broken_messages_are_read_alike(make: Callable[[Random], bytes]) -> None:
    """The compiled check, the checks in numpy and the generated class agree, and what is accepted has one encoding."""
    verdicts = Counter(assert_read_as_protobuf_reads_it(make(seeded(seed))) for seed in range(many(100_000, 1000)))
    assert verdicts[None] > 10
    assert len(verdicts) >= 5


def test_what_keeps_the_contract_is_read_and_written_alike() -> None:
    for seed in range(many(2000, 150)):
        rng = seeded(seed)
        message = valid_message(rng)
        data = canonical(message)
        if native.available() and message.header.worker_id.isascii():
            # Python would accept it if the compiled check did not, and no test would see that it is slow.
            assert native.accepts(data, SCHEMA)
        batch = batch_of(message)
        assert encode(batch, SCHEMA) == data
        for name, column in values_of(message, 1).items():
            assert list(column) == getattr(batch, name).tolist()
        assert BatchHeader(**values_of(message.header)) == batch.header
        for encoded in (data, reencoded(rng, message)):
            assert decode(encoded, SCHEMA) == batch
            with in_python():
                assert decode(encoded, SCHEMA) == batch


def rows_of(batch: LogprobBatch) -> list[Row]:
    return list(plain_rows(pb.LogprobBatch.FromString(encode(batch, SCHEMA))))


def batches() -> Iterator[tuple[Random, LogprobBatch, list[Row]]]:
    """Yield batches, each with its rows as plain Python has them, and what draws a test's choices."""
    for seed in range(many(1000, 40)):
        rng = seeded(seed)
        message = valid_message(rng)
        yield rng, decode(canonical(message), SCHEMA), list(plain_rows(message))


def test_row_holds_its_slices_of_the_columns() -> None:
    """Columns read where they lie, arrays of a reader in Python and a caller's lists give the same rows."""
    for rng, batch, rows in batches():
        data = encode(batch, SCHEMA)
        with in_python():
            read = decode(data, SCHEMA)
        assert repr(read.header) == repr(batch.header)  # with its flags and names, not only numbers like them
        for made in (decode(data, SCHEMA), read, batch_of(pb.LogprobBatch.FromString(data))):
            for name in rng.sample(sorted(COLUMN), rng.randint(0, 5)):
                getattr(made, name)
            assert made == batch
            for place, (row, expected) in enumerate(zip(made.rows(), rows, strict=True)):
                for each in (row, made.row(place)):
                    plain = (value.tolist() if isinstance(value, np.ndarray) else value for value in each[:-1])
                    assert (*plain, plain_extras(each.extras)) == expected
                    shape = (made.token_counts[place], made.top_ks[place])
                    assert each.alternative_token_ids.shape == each.alternative_logprobs.shape == shape


def test_rows_move_with_all_their_columns() -> None:
    for rng, batch, rows in batches():
        in_order = sorted(rows, key=lambda row: row.batch_index)
        places = rng.sample(range(batch.row_count), rng.randint(0, batch.row_count))
        owners = [rng.randrange(3) for _ in rows]
        for made in (batch, LogprobBatch.of_views(batch.header, batch.columns)):  # by the compiled code, and by numpy
            ordered, selected = made.in_batch_order(), made.select(places)
            assert rows_of(ordered) == in_order
            assert ordered.header == batch.header
            assert rows_of(selected) == [rows[place] for place in places]
            assert selected.header == batch.header._replace(selection=True)
            half = places[: len(places) // 2]
            assert rows_of(selected.select(range(len(half)))) == [rows[place] for place in half]
            parts = [made.select([row for row, owner in enumerate(owners) if owner == part]) for part in range(3)]
            assert rows_of(LogprobBatch.joined(parts)) == in_order


def test_between_cuts_every_column_of_a_token_together() -> None:
    """Of each row the tokens that were asked for are left, with their logprobs, ranks and alternatives (case 13)."""
    for rng, batch, rows in batches():
        counts = batch.token_counts.tolist()
        begins = [
            rng.randrange(max(count, 1)) if row.position < 2**31 - 16 else 0
            for count, row in zip(counts, rows, strict=True)
        ]
        ends = [rng.randint(min(begin + 1, count), count) for begin, count in zip(begins, counts, strict=True)]
        cut = batch.between(begins, ends)
        assert rows_of(cut) == [between(row, begin, end) for row, begin, end in zip(rows, begins, ends, strict=True)]
        assert cut.header == batch.header


def test_large_message_gets_the_same_treatment() -> None:
    message = valid_message(seeded(1), Sizes(rows=300, tokens=16, top_k=127))
    data = canonical(message)
    assert_read_as_protobuf_reads_it(data)
    batch = decode(data, SCHEMA)
    assert batch == batch_of(message)
    assert encode(batch, SCHEMA) == data
    assert rows_of(batch.in_batch_order()) == sorted(plain_rows(message), key=lambda row: row.batch_index)


@pytest.mark.parametrize("part", ["header's key", "header's length", "column's key", "column's length", "field's key"])
def test_readers_stop_at_the_same_padding(part: str) -> None:
    whose, what = part.split("'s ")
    message = pb.LogprobBatch.FromString(vector("valid", "two_rows_with_alternatives")[0])
    major, *others = message.header.SerializeToString()
    keys = struct.pack("<2Q", *message.request_ids)
    message.ClearField("header")
    message.ClearField("request_ids")
    for size in range(1, 13):
        data = canonical(message)
        header = varint(major, size if whose == "field" else 0) + bytes(others)
        for name, number, contents in (("column", 2, keys), ("header", 1, header)):
            key = varint(number << 3 | 2, size if (name, what) == (whose, "key") else 0)
            length = varint(len(contents), size if (name, what) == (whose, "length") else 0)
            data = key + length + contents + data
        assert_read_as_protobuf_reads_it(data)


@pytest.mark.parametrize("within", ["header", "message"])
def test_readers_stop_at_the_same_depth(within: str) -> None:
    message = pb.LogprobBatch.FromString(vector("valid", "one_row")[0])
    header = message.header.SerializeToString()
    message.ClearField("header")
    for depth in range(95, 105):
        groups = varint(100 << 3 | 3) * depth + varint(100 << 3 | 4) * depth
        inner, outer = (groups, b"") if within == "header" else (b"", groups)
        assert_read_as_protobuf_reads_it(record(1, 2, header + inner) + canonical(message) + outer)
