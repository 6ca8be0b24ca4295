"""Builds valid batches of any shape."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tokenbus.engines import synthetic
from tokenbus.engines.sampling import Words
from tokenbus_contracts import BatchHeader, BatchKind, LogprobBatch, RowStatus, Scoring, SpeculativeMethod, ValueKind

WORKER = "worker-0"
EPOCH = 7
_MAY_PROPOSE = (RowStatus.ACTIVE, RowStatus.HANDED_OFF)


class RowShape(NamedTuple):
    """The shape of a row, whose tokens depend on its request id and position as in `true_tokens`.

    Example:
        row = tokenbus.testing.RowShape(request_id=7, tokens=3, top_k=2, status=tokenbus.RowStatus.FINISHED_STOP)
    """

    request_id: int
    """The id of the request."""
    position: int = 0
    """The position of the first token."""
    tokens: int = 1
    status: RowStatus = RowStatus.ACTIVE
    scoring: Scoring = Scoring.FULL
    top_k: int = 0
    stop: int = 0
    """The row's value in the column `stops` if the status is FINISHED_STOP, or 0 for none."""
    drafted: int | None = None
    """The number of verified draft tokens. For None, the id of the request determines 0 or 1."""
    proposals: int | None = None
    """The number of proposed draft tokens. For None, the id and the status determine 0 to 2."""


def row_shapes(
    keys: Iterable[int], position: int = 0, tokens: int = 1, status: RowStatus = RowStatus.ACTIVE
) -> list[RowShape]:
    """Return one row for each id. The rows differ in their top-k."""
    return [RowShape(key, position, tokens, status, top_k=key % 3) for key in keys]


def batch(  # noqa: PLR0913 - keyword-only with defaults
    rows: Sequence[RowShape],
    *,
    step: int = 1,
    sequence: int = 1,
    worker_id: str = WORKER,
    epoch: int = EPOCH,
    indices: Sequence[int] | None = None,
    kind: BatchKind = BatchKind.TARGET,
    method: SpeculativeMethod | int = SpeculativeMethod.NONE,
    step_rows: int | None = None,
    part: tuple[int, int] = (0, 1),
    draft_follows: bool = False,
    selection: bool = False,
) -> LogprobBatch:
    """Return a batch of the given rows.

    Args:
        rows: the shapes of the rows, for example from `row_shapes`. step: the number of the step. sequence: the
        sequence number in the worker's stream. worker_id: the worker's id. epoch: the epoch of the worker. indices: the
        batch indices of the rows, by default 0, 1, 2 and so on. kind: a target or a draft batch. method: the
        speculative method. step_rows: the number of rows of the whole step, by default the number of given rows. part:
        the index of this part, and the number of parts of the step. draft_follows: whether a draft batch of the same
        step follows. selection: whether the batch has only some rows of the step, like a batch for a client.

    Returns:
        a batch, which is valid if the rows are valid. The values depend only on the arguments.

    Example:
        rows = tokenbus.testing.row_shapes([7, 8, 9], tokens=2)
        assert tokenbus.decode(tokenbus.encode(tokenbus.testing.batch(rows))).row_count == 3
    """
    size = len(rows)
    is_target = kind is BatchKind.TARGET
    counts = np.array([row.tokens for row in rows], np.uint8)
    scored = np.repeat(np.array([row.scoring is not Scoring.NONE for row in rows], np.bool_), counts)
    numbers = np.concatenate([np.zeros(0, np.uint64), *(_draws(row) for row in rows)])
    tokens = synthetic.sampled(numbers)
    top_ks = np.array([row.top_k for row in rows], np.uint8)
    stops = [row.stop for row in rows if row.status is RowStatus.FINISHED_STOP]
    other_ids, other_logprobs = synthetic.alternatives(numbers, np.repeat(top_ks, counts))
    drafted = [(row.request_id % 2 if row.drafted is None else row.drafted) if is_target else 0 for row in rows]
    proposals = [_proposed(row) if is_target else 0 for row in rows]
    header = BatchHeader(
        worker_id,
        epoch,
        sequence,
        step,
        size if step_rows is None else step_rows,
        part_index=part[0],
        part_count=part[1],
        selection=selection,
        kind=kind,
        method=method,
        value_kind=ValueKind.RAW_LOGPROBS,
        vocabulary_size=synthetic.VOCABULARY_SIZE,
        draft_follows=draft_follows,
    )
    return LogprobBatch(
        header,
        request_ids=np.array([row.request_id for row in rows], np.uint64),
        batch_indices=np.array(range(size) if indices is None else indices, np.uint32),
        positions=np.array([row.position for row in rows], np.uint32),
        statuses=np.array([row.status for row in rows], np.uint8),
        token_counts=counts,
        draft_token_counts=np.array(drafted, np.uint8),
        proposal_counts=np.array(proposals, np.uint8),
        scorings=np.array([row.scoring for row in rows], np.uint8),
        top_ks=top_ks,
        token_ids=tokens.ids,
        logprobs=tokens.logprobs[scored],
        ranks=tokens.ranks[scored],
        alternative_token_ids=other_ids,
        alternative_logprobs=other_logprobs,
        proposal_token_ids=np.concatenate(
            [np.zeros(0, np.uint32), *(_proposals(row, count) for row, count in zip(rows, proposals, strict=True))]
        ),
        stops=np.array(stops if any(stops) else (), np.uint8),
    )


def _draws(row: RowShape) -> Words:
    places = np.arange(row.position, row.position + row.tokens)
    return synthetic.draws(np.full(row.tokens, row.request_id, np.uint64), places)


def _proposed(row: RowShape) -> int:
    if row.proposals is not None:
        return row.proposals
    return row.request_id % 3 if row.status in _MAY_PROPOSE else 0


def _proposals(row: RowShape, count: int) -> Any:  # noqa: ANN401 - an array
    return synthetic.true_tokens(row.request_id, row.position + row.tokens, row.position + row.tokens + count).ids
