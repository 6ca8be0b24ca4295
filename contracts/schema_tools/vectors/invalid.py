"""The invalid golden messages, each with the one reason it must be refused for."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from schema_tools.vectors.build import (
    LENGTH,
    START_GROUP,
    VARINT,
    VOCABULARY,
    RowOf,
    Token,
    encoded,
    message,
    step,
    varint,
    wire_field,
)
from schema_tools.vectors.valid import stopped
from tokenbus_contracts.generated import logprob_batch_pb2 as pb

NAMED = "a value that the schema names"


class Invalid(NamedTuple):
    """A message that must be refused: its name and bytes, and the field, the rule, the limit and the value."""

    name: str
    data: bytes
    field: str
    rule: str
    limit: str
    actual: str


A = Token(11, -0.25, 1, [(11, -0.25), (7, -2.5)])
B = Token(12, -1.5, 2, [(9, -0.5), (12, -1.5)])
PLAIN = Token(42, -0.75, 1)
NAN, INFINITY = float("nan"), float("inf")


def invalid_vectors() -> Iterator[Invalid]:
    """Yield every invalid message."""
    yield from _bytes()
    for cases in (_headers, _lengths, _rows, _statuses, _scorings, _tokens, _alternatives):
        for name, batch, field, rule, limit, actual in cases():
            yield Invalid(name, encoded(batch), field, rule, str(limit), str(actual))


def _bytes() -> Iterator[Invalid]:
    whole = encoded(step([A, B]))
    yield Invalid("empty", b"", "header", "required", "a header", "none")
    yield Invalid("no_header", wire_field(11, LENGTH, b"\1\0\0\0"), "header", "required", "a header", "none")
    cut = "at most the 15 bytes that are left"
    yield Invalid("truncated", whole[:-1], "alternative_logprobs", "malformed", cut, "a length of 16")
    limit, actual = "a whole varint", "the end of the message within one"
    yield Invalid("truncated_key", whole + b"\x80", f"message[{len(whole)}]", "malformed", limit, actual)
    limit, actual = "a varint of at most 10 bytes", "a longer one"
    endless = whole + varint(50 << 3 | VARINT) + b"\x80" * 11 + b"\1"
    yield Invalid("endless_varint", endless, "field 50", "malformed", limit, actual)
    limit = "a wire type from 0 to 5"
    yield Invalid("wire_type_7", whole + varint(50 << 3 | 7), "field 50", "malformed", limit, "7")
    limit = "a field number from 1"
    yield Invalid("field_number_0", whole + b"\0\0", f"message[{len(whole)}]", "malformed", limit, "0")
    limit, actual = "a group that began", "the end of one that did not"
    yield Invalid("stray_end_group", whole + varint(50 << 3 | 4), "field 50", "malformed", limit, actual)
    lying = whole + varint(11 << 3 | LENGTH) + varint(2**31 - 1)
    limit, actual = "at most the 0 bytes that are left", f"a length of {2**31 - 1}"
    yield Invalid("lying_length", lying, "token_ids", "malformed", limit, actual)
    header = whole.replace(b"worker-0", b"w\xffrker-0")
    limit, actual = "text in UTF-8", "0xff at its byte 1"
    yield Invalid("worker_id_not_utf8", header, "header.worker_id", "malformed", limit, actual)
    ragged = wire_field(1, LENGTH, message().header.SerializeToString()) + wire_field(11, LENGTH, b"\1\0\0")
    yield Invalid("half_a_fixed32", ragged, "token_ids", "malformed", "elements of 4 bytes", "3 bytes")
    half = wire_field(1, LENGTH, message().header.SerializeToString()) + wire_field(6, LENGTH, b"\1\x81")
    limit, actual = "whole varints", "the end of the column within one"
    yield Invalid("half_a_count", half, "token_counts", "malformed", limit, actual)
    text = b'{"jsonrpc": "2.0", "method": "generate"}'
    limit, actual = "at most the 37 bytes that are left", "a length of 106"
    yield Invalid("another_protocol", text, "positions", "malformed", limit, actual)
    open_group = whole + wire_field(50, START_GROUP, varint(1 << 3 | VARINT) + b"\1")
    limit, actual = "a group that ends", "the end of the message within it"
    yield Invalid("group_without_end", open_group, "field 50", "malformed", limit, actual)


Case = tuple[str, pb.LogprobBatch, str, str, object, object]


def _headers() -> Iterator[Case]:
    version = "schema version 1 of package tokenbus.v1"
    yield "another_major", step([A], schema_major=2), "header.schema_major", "version", version, 2
    yield "no_major", step([A], schema_major=0), "header.schema_major", "version", version, 0
    yield "no_worker_id", step([A], worker_id=""), "header.worker_id", "required", "a name", "an empty string"
    yield "long_worker_id", step([A], worker_id="w" * 65), "header.worker_id", "bytes", 64, 65
    for name in ("epoch", "sequence", "step", "part_count", "kind", "phase", "method"):
        yield f"no_{name}", step([A], **{name: 0}), f"header.{name}", "min", 1, 0
    yield "too_many_parts", step([A], part_count=65), "header.part_count", "max", 64, 65
    yield "part_index_too_large", step([A], part_count=2, part_index=2), "header.part_index", "max", 1, 2
    alone = "1, the rows of the only part"
    yield "missing_rows", step([A], step_rows=2), "header.step_rows", "length", alone, 2
    yield "more_rows_than_step", step([A], [B], part_count=2, step_rows=1), "header.step_rows", "min", 2, 1
    yield "step_too_large", step([A], part_count=2, step_rows=65_537), "header.step_rows", "max", 65_536, 65_537
    for name, value in (("kind", 3), ("phase", 4), ("value_kind", 5)):
        batch = step([A], **{name: value})
        yield f"unnamed_{name}", batch, f"header.{name}", "named", NAMED, value
    yield "negative_kind", step([A], kind=-1), "header.kind", "min", 1, -1
    draft = step([A], kind=pb.BATCH_KIND_DRAFT, draft_follows=True)
    yield "draft_of_a_draft", draft, "header.draft_follows", "kind", "False in a draft batch", True
    yield "method_too_large", step([A], method=128), "header.method", "max", 127, 128
    yield "tp_rank_too_large", step([A], tp_rank=65_536), "header.tp_rank", "max", 65_535, 65_536
    yield "dp_rank_too_large", step([A], dp_rank=65_536), "header.dp_rank", "max", 65_535, 65_536
    batch = step([A], vocabulary_size=2**31)
    yield "vocabulary_too_large", batch, "header.vocabulary_size", "max", 2**31 - 1, 2**31


def _lengths() -> Iterator[Case]:
    def changed(change: Callable[[pb.LogprobBatch], object]) -> pb.LogprobBatch:
        batch = step([A, B], [B])
        change(batch)
        return batch

    rows = "2 elements, one for each row"
    for name in (
        *("batch_indices", "positions", "statuses", "token_counts", "draft_token_counts"),
        *("proposal_counts", "scorings", "top_ks"),
    ):
        short = changed(lambda batch, name=name: getattr(batch, name).pop())  # type: ignore[misc]
        yield f"{name}_short", short, name, "length", rows, 1
    long = changed(lambda batch: batch.statuses.append(pb.ROW_STATUS_ACTIVE))
    yield "statuses_long", long, "statuses", "length", rows, 3
    absent = changed(lambda batch: batch.ClearField("top_ks"))
    yield "top_ks_absent", absent, "top_ks", "length", rows, 0
    tokens, scored = "3 elements, one for each token", "3 elements, one for each scored token"
    short = changed(lambda batch: batch.token_ids.pop())
    yield "token_ids_short", short, "token_ids", "length", tokens, 2
    long = changed(lambda batch: batch.token_ids.append(0))
    yield "token_ids_long", long, "token_ids", "length", tokens, 4
    short = changed(lambda batch: batch.logprobs.pop())
    yield "one_logprob_missing", short, "logprobs", "length", scored, 2
    long = changed(lambda batch: batch.ranks.append(1))
    yield "ranks_long", long, "ranks", "length", scored, 4
    alternatives = "6 elements, top_k for each token"
    for name in ("alternative_token_ids", "alternative_logprobs"):
        short = changed(lambda batch, name=name: getattr(batch, name).pop())  # type: ignore[misc]
        yield f"{name}_short", short, name, "length", alternatives, 5
    long = changed(lambda batch: batch.proposal_token_ids.append(3))
    yield "proposals_without_count", long, "proposal_token_ids", "length", "0 elements, one for each proposal", 1


def _rows() -> Iterator[Case]:
    many = message(*(RowOf([PLAIN], key=1 + place, index=place) for place in range(513)))
    yield "too_many_rows", many, "request_keys", "items", 512, 513
    widest = step([PLAIN])
    widest.request_keys.extend(range(1, 1025))
    yield "more_rows_than_schema", widest, "request_keys", "items", 1024, 1025
    yield "key_zero", message(RowOf([A], key=0)), "request_keys[0]", "min", 1, 0
    rows = [RowOf([A], key=7, index=0), RowOf([B], key=8, index=1), RowOf([B], key=7, index=2)]
    limit = "each value only once, and request_keys[0] has it"
    yield "key_twice", message(*rows), "request_keys[2]", "unique", limit, 7
    rows = [RowOf([A], key=7, index=1), RowOf([B], key=8, index=1)]
    limit = "each value only once, and batch_indices[0] has it"
    yield "index_twice", message(*rows), "batch_indices[1]", "unique", limit, 1
    rows = [RowOf([A], key=7, index=0), RowOf([B], key=8, index=2)]
    yield "index_beyond_step", message(*rows), "batch_indices[1]", "max", 1, 2
    far = message(RowOf([A], position=2**31))
    yield "position_too_large", far, "positions[0]", "max", 2**31 - 1, 2**31
    yield "too_many_tokens", message(RowOf([A] * 9)), "token_counts[0]", "max", 8, 9
    wide = step([A])
    wide.token_counts[0] = 200
    yield "count_of_two_bytes", wide, "token_counts[0]", "max", 16, 200
    yield "too_many_drafts", message(RowOf([A], drafts=9)), "draft_token_counts[0]", "max", 8, 9
    yield "too_many_proposals", message(RowOf([A], proposals=range(9))), "proposal_counts[0]", "max", 8, 9
    wide_token = Token(1000, -0.25, 1, [(1000 + place, -0.25 - place) for place in range(21)])
    yield "too_many_alternatives", step([PLAIN], [wide_token]), "top_ks[1]", "max", 20, 21
    yield "top_k_beyond_vocabulary", step([A], vocabulary_size=1), "top_ks[0]", "max", 1, 2


def _statuses() -> Iterator[Case]:
    for number in (0, 10, 127):
        batch = message(RowOf([A]), RowOf([B], key=9, index=1, status=number))
        rule, limit = ("named", NAMED) if number else ("min", 1)
        yield f"status_{number}", batch, "statuses[1]", rule, limit, number
    wide = step([A])
    wide.statuses[0] = 300  # type: ignore[call-overload]
    yield "status_of_two_bytes", wide, "statuses[0]", "named", NAMED, 300
    silent = message(RowOf([], top_k=0))
    limit = "at least 1 token in a row that is ACTIVE"
    yield "active_without_token", silent, "token_counts[0]", "status", limit, 0
    for status in ("IDLE", "PREFILLING", "PREEMPTED", "ABORTED", "UNRECOVERABLE"):
        row = RowOf([A, B], key=9, index=1, status=pb.RowStatus.Value(f"ROW_STATUS_{status}"))
        limit = f"no token in a row that is {status}"
        yield f"{status.lower()}_with_tokens", step_with(row), "token_counts[1]", "status", limit, 2
    row = RowOf([A], key=9, index=1, status=pb.ROW_STATUS_FINISHED_STOP, proposals=[4])
    limit = "no proposal in a row that is FINISHED_STOP"
    yield "finished_with_proposals", step_with(row), "proposal_counts[1]", "status", limit, 1
    yield "stop_too_large", stopped(0, 18), "stops[1]", "max", 17, 18
    missing = stopped(1, 2)
    missing.stops.pop()
    limit = "2 elements, one for each row that is FINISHED_STOP, or none"
    yield "stops_short", missing, "stops", "length", limit, 1
    active = step_with(RowOf([A], key=9, index=1, stop=1))
    limit = "0 elements, one for each row that is FINISHED_STOP, or none"
    yield "stop_of_an_active_row", active, "stops", "length", limit, 1
    drafted = message(RowOf([A], drafts=2), kind=pb.BATCH_KIND_DRAFT)
    yield "draft_of_drafts", drafted, "draft_token_counts[0]", "kind", "0 in a draft batch", 2
    proposing = message(RowOf([A], proposals=[3]), kind=pb.BATCH_KIND_DRAFT)
    yield "draft_with_proposals", proposing, "proposal_counts[0]", "kind", "0 in a draft batch", 1


def step_with(row: RowOf) -> pb.LogprobBatch:
    """Return a step of an everyday row and another one behind it."""
    return message(RowOf([A], key=8, index=0), row)


def _scorings() -> Iterator[Case]:
    for number in (0, 4):
        batch = step([A])
        batch.scorings[0] = number  # type: ignore[call-overload]
        rule, limit = ("named", NAMED) if number else ("min", 1)
        yield f"scoring_{number}", batch, "scorings[0]", rule, limit, number
    for scoring in ("NONE", "SHED"):
        row = RowOf([PLAIN], scoring=pb.Scoring.Value(f"SCORING_{scoring}"), top_k=5)
        limit = f"0 where the row's scoring is {scoring}"
        yield f"{scoring.lower()}_with_top_k", message(row), "top_ks[0]", "scoring", limit, 5
    limit = "a kind, because rows are scored"
    yield "values_of_no_kind", step([A], value_kind=0), "header.value_kind", "scoring", limit, 0


def _tokens() -> Iterator[Case]:
    id_bound = 2_147_483_646
    yield "id_beyond_vocabulary", step([PLAIN, Token(VOCABULARY)]), "token_ids[1]", "max", VOCABULARY - 1, VOCABULARY
    batch = step([Token(2**32 - 1)], vocabulary_size=0)
    yield "id_beyond_schema", batch, "token_ids[0]", "max", id_bound, 2**32 - 1
    finite = "a finite number"
    for name, value in (("nan", NAN), ("infinite", INFINITY), ("minus_infinite", -INFINITY)):
        yield f"{name}_logprob", step([PLAIN, Token(1, value)]), "logprobs[1]", "finite", finite, value
    yield "positive_logprob", step([Token(1, 0.125)]), "logprobs[0]", "max", 0.0, 0.125
    logits = step([Token(1, NAN)], value_kind=pb.VALUE_KIND_RAW_LOGITS)
    yield "nan_logit", logits, "logprobs[0]", "finite", finite, NAN
    yield "rank_zero", step([PLAIN, Token(1, -1.0, 0)]), "ranks[1]", "min", 1, 0
    beyond = step([Token(1, -1.0, VOCABULARY + 1)])
    yield "rank_beyond_vocabulary", beyond, "ranks[0]", "max", VOCABULARY, VOCABULARY + 1
    beyond = step([Token(1, -1.0, 2**31)], vocabulary_size=0)
    yield "rank_beyond_schema", beyond, "ranks[0]", "max", 2**31 - 1, 2**31
    beyond = message(RowOf([PLAIN], proposals=[VOCABULARY]))
    yield "proposal_beyond_vocabulary", beyond, "proposal_token_ids[0]", "max", VOCABULARY - 1, VOCABULARY


def _alternatives() -> Iterator[Case]:
    def among(*alternatives: tuple[int, float], sampled: Token = PLAIN) -> pb.LogprobBatch:
        # An everyday token before it, so that the faulty element is never the first.
        return step([A, Token(sampled.id, sampled.logprob, sampled.rank, alternatives)])

    ids, values = "alternative_token_ids", "alternative_logprobs"
    first = (42, -0.75)
    beyond = among(first, (VOCABULARY, -2.0))
    yield "alternative_beyond_vocabulary", beyond, f"{ids}[3]", "max", VOCABULARY - 1, VOCABULARY
    finite = "a finite number"
    yield "nan_alternative", among(first, (7, NAN)), f"{values}[3]", "finite", finite, NAN
    yield "nan_first_alternative", among((7, NAN), first), f"{values}[2]", "finite", finite, NAN
    yield "minus_infinite_alternative", among(first, (7, -INFINITY)), f"{values}[3]", "finite", finite, -INFINITY
    yield "positive_alternative", among((7, 1.5), first), f"{values}[2]", "max", 0.0, 1.5
    ascending = among((42, -0.75), (7, -0.5))
    yield "ascending", ascending, f"{values}[3]", "order", "at most -0.75, the one before it", -0.5
    limit = "above 42, whose value is the same"
    yield "tie_of_lower_id", among(first, (7, -0.75)), f"{ids}[3]", "order", limit, 7
    yield "same_alternative_twice", among(first, (42, -0.75)), f"{ids}[3]", "order", limit, 42
    other_value = among((7, -0.5), (42, -1.0), sampled=Token(42, -0.75, 9))
    limit = "a rank that fits logprob -0.75 beside -1.0 at place 2 of the alternatives"
    yield "rank_too_low_for_value", other_value, "ranks[1]", "agreement", limit, 9
    other_value = among((7, -0.75), (42, -1.0), sampled=Token(42, -0.75, 1))
    limit = "-0.75, the value of the same token in logprobs[1]"
    yield "two_values_of_one_token", other_value, f"{values}[3]", "agreement", limit, -1.0
    wrong_rank = among((7, -0.5), first, sampled=Token(42, -0.75, 1))
    limit = "a rank that fits logprob -0.75 beside -0.5 at place 1 of the alternatives"
    yield "rank_of_another", wrong_rank, "ranks[1]", "agreement", limit, 1
    beyond = among((7, -0.5), first, sampled=Token(42, -0.75, 3))
    ranked_behind_itself = beyond
    ranked_behind_itself.alternative_logprobs[3] = -2.0
    limit = "a rank that fits logprob -0.75 beside -2.0 at place 2 of the alternatives"
    yield "rank_behind_itself", ranked_behind_itself, "ranks[1]", "agreement", limit, 3
