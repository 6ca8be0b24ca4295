"""Messages from rows, in plain Python, and wire fields by hand for what no generated class would write."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenbus_contracts.generated.logprob_batch_pb2 import (
    BATCH_KIND_TARGET,
    ROW_STATUS_ACTIVE,
    SCORING_FULL,
    SCORING_NONE,
    SPECULATIVE_METHOD_MTP,
    STEP_PHASE_DECODE,
    VALUE_KIND_RAW_LOGPROBS,
    BatchHeader,
    LogprobBatch,
)

VOCABULARY = 151_936
VARINT, FIXED64, LENGTH, START_GROUP, END_GROUP, FIXED32 = range(6)


@dataclass(frozen=True)
class Token:
    """One token with its logprob, its rank and its alternatives."""

    id: int
    logprob: float = -0.5
    rank: int = 1
    alternatives: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True)
class RowOf:
    """One row of a message that is to be built."""

    tokens: Sequence[Token] = ()
    key: int = 0x51
    index: int = 0
    position: int = 0
    status: int = ROW_STATUS_ACTIVE
    drafts: int = 0
    proposals: Sequence[int] = ()
    scoring: int = SCORING_FULL
    top_k: int | None = None
    stop: int | None = None


def message(*rows: RowOf, **header: Any) -> LogprobBatch:  # noqa: ANN401 - a header's fields have many types
    """Return the message with these rows; header fields that are not given have everyday values."""
    fields: dict[str, Any] = {
        "schema_major": 1,
        "worker_id": "worker-0",
        "epoch": 1_790_000_000_000_000_000,
        "sequence": 41,
        "step": 40,
        "part_count": 1,
        "step_rows": len(rows),
        "kind": BATCH_KIND_TARGET,
        "phase": STEP_PHASE_DECODE,
        "method": SPECULATIVE_METHOD_MTP,
        "value_kind": VALUE_KIND_RAW_LOGPROBS,
        "vocabulary_size": VOCABULARY,
        "produced_at_ns": 1_790_000_000_123_456_789,
    }
    batch = LogprobBatch(header=BatchHeader(**(fields | header)))
    for row in rows:
        _append(batch, row)
    return batch


def step(*rows: Sequence[Token], **header: Any) -> LogprobBatch:  # noqa: ANN401
    """Return the message of an everyday step: rows of tokens, in batch order, with keys and positions of their own."""
    return message(
        *(
            RowOf(tokens, key=0x51 + 0x100 * place, index=place, position=7 * place, drafts=3)
            for place, tokens in enumerate(rows)
        ),
        **header,
    )


def _append(batch: LogprobBatch, row: RowOf) -> None:
    batch.request_keys.append(row.key)
    batch.batch_indices.append(row.index)
    batch.positions.append(row.position)
    batch.statuses.append(row.status)  # type: ignore[arg-type]
    batch.token_counts.append(len(row.tokens))
    batch.draft_token_counts.append(row.drafts)
    batch.proposal_counts.append(len(row.proposals))
    batch.scorings.append(row.scoring)  # type: ignore[arg-type]
    longest = max((len(token.alternatives) for token in row.tokens), default=0)
    batch.top_ks.append(longest if row.top_k is None else row.top_k)
    batch.proposal_token_ids.extend(row.proposals)
    if row.stop is not None:
        batch.stops.append(row.stop)
    for token in row.tokens:
        batch.token_ids.append(token.id)
        if row.scoring != SCORING_NONE:
            batch.logprobs.append(token.logprob)
            batch.ranks.append(token.rank)
        batch.alternative_token_ids.extend(token_id for token_id, _ in token.alternatives)
        batch.alternative_logprobs.extend(logprob for _, logprob in token.alternatives)


def encoded(batch: LogprobBatch) -> bytes:
    """Return the message's bytes as the generated class writes them."""
    return batch.SerializeToString(deterministic=True)


def varint(value: int, padding: int = 0) -> bytes:
    """Return a varint, made longer by as many bytes of nothing as are asked for."""
    digits = []
    while True:
        value, digit = value >> 7, value & 0x7F
        digits.append(digit)
        if not value:
            break
    digits += [0] * padding
    return bytes(digit | 0x80 for digit in digits[:-1]) + bytes(digits[-1:])


def wire_field(number: int, wire_type: int, contents: bytes) -> bytes:
    """Return one field as it is on the wire; contents of wire type LENGTH get theirs."""
    length = varint(len(contents)) if wire_type == LENGTH else b""
    return varint(number << 3 | wire_type) + length + contents


def wire_fields(data: bytes) -> list[tuple[int, bytes]]:
    """Return the top-level fields of a plain message: number and contents."""
    found = []
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        length, at = _read_varint(data, at)
        found.append((key >> 3, data[at : at + length]))
        at += length
    return found


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        digit = data[at]
        value |= (digit & 0x7F) << shift
        shift += 7
        at += 1
        if digit < 1 << 7:
            return value, at
