"""The valid golden messages."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from schema_tools.vectors.build import (
    END_GROUP,
    FIXED32,
    FIXED64,
    LENGTH,
    START_GROUP,
    VARINT,
    RowOf,
    Token,
    encoded,
    message,
    step,
    varint,
    wire_field,
    wire_fields,
)
from tokenbus_contracts.generated import logprob_batch_pb2 as pb


class Valid(NamedTuple):
    """A message that holds: its name, what it shows, its bytes, and what any protobuf parser reads in it."""

    name: str
    shows: str
    data: bytes
    batch: pb.LogprobBatch


A = Token(11, -0.25, 1, [(11, -0.25), (7, -2.5)])
B = Token(12, -1.5, 2, [(9, -0.5), (12, -1.5)])
PLAIN = Token(42, -0.75, 1)


def valid_vectors() -> Iterator[Valid]:
    """Yield every valid message: first what a batch can hold, then how the same batch can be encoded."""
    for name, shows, batch in _batches():
        yield Valid(name, shows, encoded(batch), batch)
    yield from _encodings()


def _batches() -> Iterator[tuple[str, str, pb.LogprobBatch]]:
    yield "empty_step", "a step without rows", message(method=pb.SPECULATIVE_METHOD_NONE)
    yield "one_row", "one row with one token", step([PLAIN])
    yield "two_rows_with_alternatives", "two rows, two alternatives a token", step([A, B], [B])
    yield "token_id_zero", "token id 0 is a token like any other", step([Token(0, -0.5, 1, [(0, -0.5), (1, -0.75)])])
    top_20 = [(100 + place, -0.125 * (place + 1)) for place in range(20)]
    mixed_top_k = step(
        [PLAIN],
        [Token(100, -0.125, 1, top_20[:1])],
        [Token(104, -0.625, 5, top_20[:5]), Token(1, -9.0, 77, top_20[:5])],
        [Token(119, -2.5, 20, top_20)],
    )
    yield "mixed_top_k", "each row has as many alternatives as it asked for", mixed_top_k
    yield "mixed_counts", "rows of 1, 3, 8 and 2 tokens", step([A], [A, B, A], [B] * 8, [B, A])
    first = RowOf([A], status=pb.ROW_STATUS_HANDED_OFF, proposals=[5, 0, 6])
    yield (
        "prefill_first_token_with_proposals",
        "a prefill worker's first token and the drafts it hands over",
        message(first, phase=pb.STEP_PHASE_PREFILL),
    )
    yield "draft", "what the draft model proposed", step_of_drafts()
    yield from _statuses()
    yield from _headers()
    yield from _values()
    yield "largest_by_default", "512 rows of 8 tokens with 20 alternatives each", largest()


def step_of_drafts() -> pb.LogprobBatch:
    """Return a draft batch of two rows."""
    return message(RowOf([A, B], key=1, index=1), RowOf([B], key=2, index=0), kind=pb.BATCH_KIND_DRAFT)


def largest() -> pb.LogprobBatch:
    """Return the largest batch that a deployment takes by default."""
    alternatives = [(1000 + place, -0.25 * (place + 1)) for place in range(20)]
    token = Token(1000, -0.25, 1, alternatives)
    rows = (RowOf([token] * 8, key=1 + place, index=place, drafts=8) for place in range(512))
    return message(*rows)


def _statuses() -> Iterator[tuple[str, str, pb.LogprobBatch]]:
    for name, status, tokens in (
        ("idle", pb.ROW_STATUS_IDLE, []),
        ("prefilling", pb.ROW_STATUS_PREFILLING, []),
        ("preempted", pb.ROW_STATUS_PREEMPTED, []),
        ("handed_off", pb.ROW_STATUS_HANDED_OFF, []),
        ("finished_stop", pb.ROW_STATUS_FINISHED_STOP, [A, B]),
        ("finished_stop_without_token", pb.ROW_STATUS_FINISHED_STOP, []),
        ("finished_length", pb.ROW_STATUS_FINISHED_LENGTH, [A]),
        ("aborted", pb.ROW_STATUS_ABORTED, []),
        ("unrecoverable", pb.ROW_STATUS_UNRECOVERABLE, []),
    ):
        rows = (RowOf([A], key=1, index=0), RowOf(tokens, key=2, index=1, status=status, position=9))
        yield name, f"a row that is {name.replace('_', ' ')}, beside an active one", message(*rows)
    yield "stops", "rows that ended by a stop token, a stop text, and neither, beside an active one", stopped(1, 5, 0)


def stopped(*stops: int) -> pb.LogprobBatch:
    """Return a batch of an active row and of rows that ended by these stops."""
    ended = (
        RowOf([A], key=2 + place, index=1 + place, status=pb.ROW_STATUS_FINISHED_STOP, stop=stop)
        for place, stop in enumerate(stops)
    )
    return message(RowOf([B], key=1, index=0), *ended)


def _headers() -> Iterator[tuple[str, str, pb.LogprobBatch]]:
    rows = [RowOf([A], key=4, index=3), RowOf([B], key=3, index=0)]
    yield "first_part", "the first part of a step in two", message(*rows, part_count=2, step_rows=4)
    rows = [RowOf([A], key=2, index=1), RowOf([B], key=1, index=2)]
    yield "last_part", "the last part of it", message(*rows, part_count=2, part_index=1, step_rows=4, sequence=42)
    rows = [RowOf([A], key=2, index=300), RowOf([B], key=1, index=17)]
    yield "selection", "one client's rows of a step of 400", message(*rows, selection=True, step_rows=400)
    rows = [RowOf([A], key=1, index=0)]
    yield "draft_follows", "a target batch whose draft batch is still to come", message(*rows, draft_follows=True)
    rows = [RowOf([A], key=3, index=2), RowOf([B], key=1, index=0), RowOf([A, A], key=2, index=1)]
    yield "permuted", "rows in another order than in the original batch", message(*rows)
    widest = message(
        RowOf([Token(2_147_483_646, -0.5, 2_147_483_647)], key=2**64 - 1, position=2_147_483_647),
        worker_id="\N{GREEK SMALL LETTER OMEGA}" * 32,
        epoch=2**64 - 1,
        sequence=2**64 - 1,
        step=2**64 - 1,
        phase=pb.STEP_PHASE_MIXED,
        tp_rank=65_535,
        dp_rank=65_535,
        vocabulary_size=2_147_483_647,
        weight_version=2**64 - 1,
        produced_at_ns=2**64 - 1,
        schema_minor=2**32 - 1,
    )
    yield "widest_values", "every header field and every id as large as it may be", widest
    yield "unknown_method", "a speculative method that a newer minor added", step([A], method=99)
    bare = message(RowOf([Token(200_000)]), vocabulary_size=0, produced_at_ns=0)
    yield "vocabulary_not_known", "any id within the schema's bound, where the model's is not told", bare


def _values() -> Iterator[tuple[str, str, pb.LogprobBatch]]:
    only_ids = RowOf([PLAIN, PLAIN], scoring=pb.SCORING_NONE)
    yield "ids_only", "no row is scored", message(only_ids, value_kind=pb.VALUE_KIND_UNSPECIFIED)
    rows = (
        RowOf([A, B], key=1, index=0),
        RowOf([PLAIN, PLAIN, PLAIN], key=2, index=1, scoring=pb.SCORING_NONE),
        RowOf([PLAIN], key=3, index=2, scoring=pb.SCORING_SHED),
        RowOf([B], key=4, index=3),
    )
    yield "mixed_scoring", "rows with logprobs, without, and with shed alternatives", message(*rows)
    ties = Token(5, -1.0, 3, [(9, -0.5), (3, -1.0), (5, -1.0), (8, -1.0)])
    yield "ties", "alternatives of the same value, the lower id first", step([ties])
    last_of_ties = Token(5, -1.0, 9, [(9, -0.5), (3, -1.0), (5, -1.0)])
    yield "last_of_ties", "a rank that counts every token of the same value", step([last_of_ties])
    pushed_out = Token(8, -1.0, 2, [(9, -0.5), (3, -1.0)])
    yield "pushed_out_by_ties", "a token whose equals took its place among the alternatives", step([pushed_out])
    yield (
        "sampled_elsewhere",
        "a token that is not among its alternatives",
        step([Token(77, -4.0, 1234, A.alternatives)]),
    )
    floored = Token(4, -9999.0, 151_936, [(1, 0.0), (2, -9999.0)])
    yield "floored", "minus infinity as engines write it, and certainty", step([floored])
    logits = step([Token(11, 17.5, 1, [(11, 17.5), (7, 3.25), (8, -1.0)])], value_kind=pb.VALUE_KIND_RAW_LOGITS)
    yield "logits", "logits, which may be positive", logits
    processed = step([B], value_kind=pb.VALUE_KIND_PROCESSED_LOGPROBS)
    yield "processed_logprobs", "logprobs after temperature and masks", processed


def _encodings() -> Iterator[Valid]:
    batch = step([A, B], [PLAIN], [B])
    data = encoded(batch)
    fields = wire_fields(data)
    yield Valid("fields_in_reverse", "fields in reverse order", _joined(reversed(fields)), batch)
    yield Valid("unpacked", "every column unpacked, element by element", _unpacked(fields), batch)
    yield Valid("split", "every packed column in two pieces, which concatenate", _split(fields), batch)
    yield Valid("interleaved", "columns packed, unpacked and split in turns", _interleaved(fields), batch)
    yield Valid("padded_varints", "keys, lengths and counts longer than they need be", _padded(fields), batch)
    minor = pb.LogprobBatch()
    minor.CopyFrom(batch)
    minor.header.schema_minor = 7
    yield Valid("newer_minor", "a newer minor's message, with unknown fields", _with_unknown(minor), minor)
    header = fields[0][1]
    twice = wire_field(1, LENGTH, header) + wire_field(1, LENGTH, varint(6 << 3 | VARINT) + varint(55))
    merged = pb.LogprobBatch()
    merged.CopyFrom(batch)
    merged.header.step = 55
    yield Valid("header_twice", "a header in two pieces, which merge", twice + _joined(fields[1:]), merged)
    again = wire_field(1, LENGTH, header + varint(6 << 3 | VARINT) + varint(55))
    yield Valid("step_twice", "a number given twice, of which the last counts", again + _joined(fields[1:]), merged)


_BYTES = {5, 6, 7, 8, 9, 10, 17}
_ITEM_BYTES = {2: 8}


def _items(number: int, contents: bytes) -> list[bytes]:
    size = 1 if number in _BYTES else _ITEM_BYTES.get(number, 4)
    return [contents[at : at + size] for at in range(0, len(contents), size)]


def _item_type(number: int) -> int:
    return VARINT if number in _BYTES else {2: FIXED64}.get(number, FIXED32)


def _joined(fields: Iterator[tuple[int, bytes]] | list[tuple[int, bytes]]) -> bytes:
    return b"".join(wire_field(number, LENGTH, contents) for number, contents in fields)


def _unpacked(fields: list[tuple[int, bytes]]) -> bytes:
    (_, header), *columns = fields
    loose = (
        wire_field(number, _item_type(number), item)
        for number, contents in columns
        for item in _items(number, contents)
    )
    return wire_field(1, LENGTH, header) + b"".join(loose)


def _split(fields: list[tuple[int, bytes]]) -> bytes:
    (_, header), *columns = fields
    pieces = [wire_field(1, LENGTH, header)]
    for first in (True, False):
        for number, contents in columns:
            items = _items(number, contents)
            half = items[: len(items) // 2] if first else items[len(items) // 2 :]
            pieces.append(wire_field(number, LENGTH, b"".join(half)))
    return b"".join(pieces)


def _interleaved(fields: list[tuple[int, bytes]]) -> bytes:
    (_, header), *columns = fields
    pieces = []
    for number, contents in columns:
        first, *others = _items(number, contents)
        pieces.append(wire_field(number, _item_type(number), first))
        pieces.append(wire_field(number, LENGTH, b"".join(others)))
    return b"".join(pieces) + wire_field(1, LENGTH, header)


def _padded(fields: list[tuple[int, bytes]]) -> bytes:
    pieces = []
    for number, contents in fields:
        inside = contents
        if number in _BYTES:
            inside = b"".join(varint(value, padding=2) for value in contents)
        pieces.append(varint(number << 3 | LENGTH, padding=1) + varint(len(inside), padding=3) + inside)
    return b"".join(pieces)


def _with_unknown(batch: pb.LogprobBatch) -> bytes:
    number = 15_001
    group = wire_field(number, START_GROUP, b"") + wire_field(3, VARINT, b"\1") + wire_field(number, END_GROUP, b"")
    unknown = (
        wire_field(number, VARINT, varint(2**64 - 1))
        + wire_field(number, FIXED64, struct.pack("<d", 0.5))
        + wire_field(number, LENGTH, b"a newer minor's column")
        + wire_field(number, FIXED32, b"\0\0\0\1")
        + group
    )
    (_, header), *columns = wire_fields(encoded(batch))
    return wire_field(1, LENGTH, header + unknown) + unknown + _joined(columns) + unknown
