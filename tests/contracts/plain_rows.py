"""What a message holds, taken out of it by plain Python: the values of a batch, and its rows one by one."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenbus_contracts import BatchHeader, LogprobBatch
from tokenbus_contracts.generated import logprob_batch_pb2 as pb


def values_of(message: pb.LogprobBatch | pb.BatchHeader, skipped: int = 0) -> dict[str, Any]:
    """Return the values of a message's fields by name, but for the first few."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields[skipped:]}


def batch_of(message: pb.LogprobBatch) -> LogprobBatch:
    """Return a message's values as a batch, made as a user would make it."""
    header = BatchHeader(**values_of(message.header))
    return LogprobBatch(header, **{name: list(column) for name, column in values_of(message, 1).items()})


class PlainRow(NamedTuple):
    """One row as Python numbers: what `Row` holds, in the same order."""

    key: int
    batch_index: int
    position: int
    status: int
    draft_token_count: int
    scoring: int
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    alternative_token_ids: list[list[int]]
    alternative_logprobs: list[list[float]]
    proposal_token_ids: list[int]
    stop: int


def plain_rows(message: pb.LogprobBatch) -> Iterator[PlainRow]:
    """Yield a message's rows, taken from the columns one element after the other."""
    ids, logprobs, ranks = iter(message.token_ids), iter(message.logprobs), iter(message.ranks)
    other_ids, values = iter(message.alternative_token_ids), iter(message.alternative_logprobs)
    proposals = iter(message.proposal_token_ids)
    stops = iter(message.stops)
    for row, count in enumerate(message.token_counts):
        scored = range(count if message.scorings[row] != pb.SCORING_NONE else 0)
        top_k = range(message.top_ks[row])
        yield PlainRow(
            message.request_keys[row],
            message.batch_indices[row],
            message.positions[row],
            message.statuses[row],
            message.draft_token_counts[row],
            message.scorings[row],
            [next(ids) for _ in range(count)],
            [next(logprobs) for _ in scored],
            [next(ranks) for _ in scored],
            [[next(other_ids) for _ in top_k] for _ in range(count)],
            [[next(values) for _ in top_k] for _ in range(count)],
            [next(proposals) for _ in range(message.proposal_counts[row])],
            next(stops) if message.stops and message.statuses[row] == pb.ROW_STATUS_FINISHED_STOP else 0,
        )
