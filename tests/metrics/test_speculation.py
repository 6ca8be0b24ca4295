"""What draft models are worth, counted from steps."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.processor.speculation import MOST_HEADS, Speculation
from tokenbus_contracts import BatchHeader, LogprobBatch, RowStatus, Scoring, ValueKind


def rows(pairs: list[tuple[int, int]], *, step: int = 1) -> LogprobBatch:
    size, tokens = len(pairs), sum(emitted for _, emitted in pairs)
    return LogprobBatch(
        BatchHeader("w", 1, 1, step, size, value_kind=ValueKind.RAW_LOGPROBS),
        request_ids=np.arange(1, size + 1),
        batch_indices=np.arange(size),
        positions=[0] * size,
        statuses=[RowStatus.ACTIVE] * size,
        token_counts=[emitted for _, emitted in pairs],
        draft_token_counts=[drafted for drafted, _ in pairs],
        proposal_counts=[0] * size,
        scorings=[Scoring.NONE] * size,
        top_ks=[0] * size,
        token_ids=[0] * tokens,
    )


def counted(*steps: list[tuple[int, int]]) -> Speculation:
    speculation = Speculation()
    for step in steps:
        speculation.add(rows(step))
    return speculation


PAIR = st.tuples(st.integers(0, MOST_HEADS), st.integers(0, 16))


@given(st.lists(st.lists(PAIR, max_size=40), max_size=4))
def test_totals_are_those_of_counting_row_by_row(steps: list[list[tuple[int, int]]]) -> None:
    """Rows that verified no draft, or emitted nothing, say nothing about the draft model (case 25)."""
    speculation = counted(*steps)
    counting = [(drafted, emitted) for step in steps for drafted, emitted in step if drafted and emitted]
    accepted = [min(emitted - 1, drafted) for drafted, emitted in counting]
    assert speculation.rows == len(counting)
    heads = range(1, max((drafted for drafted, _ in counting), default=0) + 1)
    assert speculation.heads() == [
        (head, sum(drafted >= head for drafted, _ in counting), sum(taken >= head for taken in accepted))
        for head in heads
    ]
