"""What a message holds, taken out of it by plain Python: the values of a batch, and its rows one by one."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenbus_contracts import BatchHeader, LogprobBatch, Row
from tokenbus_contracts.extras import Extras
from tokenbus_contracts.generated import logprob_batch_pb2 as pb


def values_of(message: pb.LogprobBatch | pb.BatchHeader, skipped: int = 0) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields[skipped:]}


def batch_of(message: pb.LogprobBatch) -> LogprobBatch:
    header = BatchHeader(**values_of(message.header))
    return LogprobBatch(header, **{name: list(column) for name, column in values_of(message, 1).items()})


class PlainExtras(NamedTuple):
    """What a row has beyond its logprobs: as `Extras`, but of each mask its size and, if it is told, its ids."""

    other_logprobs: list[float]
    entropies: list[float]
    given_token_ids: list[int]
    given_logprobs: list[list[float]]
    masks: list[tuple[int, list[int] | None]]

    def between(self, begin: int, end: int) -> "PlainExtras":
        part = slice(begin, end)
        given = self.given_logprobs[part]
        return PlainExtras(
            self.other_logprobs[part], self.entropies[part], self.given_token_ids, given, self.masks[part]
        )


def plain_extras(extras: Extras | None) -> PlainExtras | None:
    if extras is None:
        return None
    masks = zip(extras.mask_sizes.tolist(), extras.masks(), strict=True)
    return PlainExtras(
        extras.other_logprobs.tolist(),
        extras.entropies.tolist(),
        extras.given_token_ids.tolist(),
        extras.given_logprobs.tolist(),
        [(size, None if ids is None else ids.tolist()) for size, ids in masks],
    )


def between(row: Row, begin: int, end: int) -> Row:
    plain: Any = row
    scored = slice(begin, end) if plain.logprobs else slice(0)
    return row._replace(
        position=row.position + begin,
        token_ids=plain.token_ids[begin:end],
        logprobs=plain.logprobs[scored],
        ranks=plain.ranks[scored],
        alternative_token_ids=plain.alternative_token_ids[begin:end],
        alternative_logprobs=plain.alternative_logprobs[begin:end],
        extras=plain.extras and plain.extras.between(begin, end),
    )


def plain_rows(message: pb.LogprobBatch) -> Iterator[Row]:
    """Yield a message's rows with Python numbers and lists, taken from the columns one element after the other."""
    ids, logprobs, ranks = iter(message.token_ids), iter(message.logprobs), iter(message.ranks)
    other_ids, values = iter(message.alternative_token_ids), iter(message.alternative_logprobs)
    proposals = iter(message.proposal_token_ids)
    stops = iter(message.stops)
    extras = _plain_extras(message)
    for row, count in enumerate(message.token_counts):
        scored = range(count if message.scorings[row] != pb.SCORING_NONE else 0)
        top_k = range(message.top_ks[row])
        found = (
            message.request_ids[row],
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
            next(extras),
        )
        yield Row._make(found)


def _plain_extras(message: pb.LogprobBatch) -> Iterator[PlainExtras | None]:
    """Yield each row's extras, taken from the columns one element after the other."""
    other, entropies, ids = iter(message.other_logprobs), iter(message.entropies), iter(message.given_token_ids)
    values, sizes, masks = iter(message.given_logprobs), iter(message.mask_sizes), iter(message.mask_token_ids)
    for row, count in enumerate(message.token_counts):
        kinds, given, bound = (
            column[row] if column else 0 for column in (message.extras, message.given_counts, message.mask_bounds)
        )
        found = PlainExtras(
            [next(other) for _ in range(count if kinds & 1 else 0)],
            [next(entropies) for _ in range(count if kinds & 2 else 0)],
            [next(ids) for _ in range(given)],
            [[next(values) for _ in range(given)] for _ in range(count)],
            [
                (size, [next(masks) for _ in range(size)] if size <= bound else None)
                for size in (next(sizes) for _ in range(count if bound else 0))
            ],
        )
        yield found if kinds or given or bound else None
