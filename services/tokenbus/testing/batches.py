"""Valid batches of any shape."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tokenbus.engines import synthetic
from tokenbus.engines.sampling import Words
from tokenbus_contracts import (
    BatchHeader,
    BatchKind,
    LogprobBatch,
    RowStatus,
    Scoring,
    SpeculativeMethod,
    ValueKind,
)

WORKER = "worker-0"
EPOCH = 7
_MAY_PROPOSE = (RowStatus.ACTIVE, RowStatus.HANDED_OFF)


class RowShape(NamedTuple):
    """A row of a batch to be built; its tokens follow from its key and position, as `true_tokens` tells them.

    Example:
        row = tokenbus.testing.RowShape(key=7, tokens=3, top_k=2, status=tokenbus.RowStatus.FINISHED_STOP)
    """

    key: int
    """The request's id."""
    position: int = 0
    """The position of its first token."""
    tokens: int = 1
    status: RowStatus = RowStatus.ACTIVE
    scoring: Scoring = Scoring.FULL
    top_k: int = 0
    stop: int = 0
    """Which of its request's stops ended it, where the status is FINISHED_STOP; 0: none of them."""
    drafted: int | None = None
    """How many draft tokens were verified for it; None: 0 or 1, as its key is even or odd."""
    proposals: int | None = None
    """How many draft tokens are proposed for its next step; None: up to 2 by its key, where its status allows some."""


def row_shapes(
    keys: Iterable[int], position: int = 0, tokens: int = 1, status: RowStatus = RowStatus.ACTIVE
) -> list[RowShape]:
    """Return one row for each key, all alike but for their top-k, as neighbours' are."""
    return [RowShape(key, position, tokens, status, top_k=key % 3) for key in keys]


def batch(  # noqa: PLR0913 - each has a name and a default
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
    """Return a batch of these rows, valid as long as they are, in this order of columns.

    Args:
        rows: the rows; `row_shapes` makes some that are alike.
        step: the number of the step.
        sequence: the item's place in the worker's stream.
        worker_id: the worker's id.
        epoch: which life of the worker.
        indices: the rows' places in the original batch; default: as they are given.
        kind: the target's batch, or the draft's.
        method: how tokens were drafted.
        step_rows: how many rows the whole step has; default: these.
        part: the index of this part, and how many parts there are.
        draft_follows: whether a draft batch of the step follows.
        selection: whether it holds some rows of a step, as a client's.

    Returns:
        the batch, whose values follow from the rows alone.

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
    drafted = [(row.key % 2 if row.drafted is None else row.drafted) if is_target else 0 for row in rows]
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
        request_ids=np.array([row.key for row in rows], np.uint64),
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
    return synthetic.draws(np.full(row.tokens, row.key, np.uint64), places)


def _proposed(row: RowShape) -> int:
    if row.proposals is not None:
        return row.proposals
    return row.key % 3 if row.status in _MAY_PROPOSE else 0


def _proposals(row: RowShape, count: int) -> Any:  # noqa: ANN401 - an array
    return synthetic.true_tokens(row.key, row.position + row.tokens, row.position + row.tokens + count).ids
