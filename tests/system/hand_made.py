"""Batches made by hand, whose tokens are the true ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tokenbus.engines import synthetic
from tokenbus_contracts import BatchHeader, BatchKind, LogprobBatch, RowStatus, Scoring, ValueKind


@dataclass(frozen=True, slots=True)
class MadeRow:
    """One request's share of a step."""

    key: int
    position: int
    tokens: int = 1
    status: RowStatus = RowStatus.ACTIVE
    proposals: Sequence[int] = ()
    top_k: int = 0


def step(
    number: int, rows: Sequence[MadeRow], kind: BatchKind = BatchKind.TARGET, *, draft_follows: bool = False
) -> LogprobBatch:
    counts = np.array([row.tokens for row in rows], np.intp)
    keys = np.repeat(np.array([row.key for row in rows], np.uint64), counts)
    positions = [np.arange(row.position, row.position + row.tokens, dtype=np.uint64) for row in rows]
    numbers = synthetic.draws(keys, np.concatenate(positions))
    tokens = synthetic.sampled(numbers)
    ids, logprobs = synthetic.alternatives(numbers, np.repeat([row.top_k for row in rows], counts))
    columns: Mapping[str, object] = {
        "request_keys": [row.key for row in rows],
        "batch_indices": np.arange(len(rows))[::-1].copy(),
        "positions": [row.position for row in rows],
        "statuses": [row.status for row in rows],
        "token_counts": counts,
        "draft_token_counts": [0] * len(rows),
        "proposal_counts": [len(row.proposals) for row in rows],
        "scorings": [Scoring.FULL] * len(rows),
        "top_ks": [row.top_k for row in rows],
        "token_ids": tokens.ids,
        "logprobs": tokens.logprobs,
        "ranks": tokens.ranks,
        "alternative_token_ids": ids,
        "alternative_logprobs": logprobs,
        "proposal_token_ids": [token for row in rows for token in row.proposals],
    }
    header = BatchHeader(
        "",
        epoch=1,
        sequence=1,
        step=number,
        step_rows=len(rows),
        kind=kind,
        draft_follows=draft_follows,
        value_kind=ValueKind.RAW_LOGPROBS,
        vocabulary_size=synthetic.VOCABULARY_SIZE,
    )
    return LogprobBatch(header, **columns)  # type: ignore[arg-type]  # a column is whatever numpy reads
