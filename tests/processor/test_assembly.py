"""Assembler: parts and kinds become steps, in the order of their numbers and in original batch order."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.in_process.builders import EPOCH, WORKER, row_values, settings
from tokenbus.delivery import Step
from tokenbus.processor.assembly import Assembler
from tokenbus.processor.stream import ItemOutcome
from tokenbus.testing import RowShape, batch, row_shapes
from tokenbus_contracts import BatchKind, ContractError, LogprobBatch

DRAFT = BatchKind.DRAFT
WAIT = 2.0
"""How long a step waits for its other parts, in seconds."""


def assembler(**processor: object) -> Assembler:
    usual: dict[str, object] = {"step_timeout_ms": int(WAIT * 1000), "draft_lag_steps": 1, "max_open_steps": 4}
    chosen = settings({f"processor.{name}": value for name, value in (usual | processor).items()})
    return Assembler(WORKER, EPOCH, chosen.processor)


def numbers(made: Assembler, now: float = 0.0) -> list[int]:
    return [step.number for step in made.ready(now)]


def only(made: Assembler, now: float = 0.0) -> Step:
    (step,) = made.ready(now)
    return step


def parts_of(
    wanted: Sequence[RowShape],
    order: Sequence[int],
    cuts: Sequence[int],
    **header: Any,  # noqa: ANN401 - a header
) -> list[LogprobBatch]:
    bounds = [0, *cuts, len(wanted)]
    pieces = [list(order[begin:end]) for begin, end in pairwise(bounds)]
    return [
        batch(
            [wanted[place] for place in piece],
            indices=piece,
            step_rows=len(wanted),
            part=(number, len(pieces)),
            **header,
        )
        for number, piece in enumerate(pieces)
    ]


@given(st.permutations(range(6)), st.lists(st.integers(0, 6), max_size=3), st.randoms(use_true_random=False))
def test_every_column_comes_into_batch_order_together(order: list[int], cuts: list[int], rng: Any) -> None:  # noqa: ANN401
    """However rows are permuted, cut into parts and delayed, each row has all of its own values (case 1, 3, 5, 11)."""
    wanted = [RowShape(request_id=place + 10, position=place, tokens=place % 4, top_k=place % 3) for place in range(6)]
    wanted = [row if row.tokens else row._replace(status=2) for row in wanted]  # type: ignore[arg-type]
    parts = parts_of(wanted, order, sorted(cuts), step=1)
    rng.shuffle(parts)
    made = assembler()
    for part in parts:
        assert numbers(made) == []
        assert made.add(part, 0.0)[0] is ItemOutcome.TAKEN
    step = only(made)
    expected = batch(wanted)
    assert step.target.request_ids.tolist() == [row.request_id for row in wanted]
    assert [row_values(row) for row in step.target.rows()] == [row_values(row) for row in expected.rows()]
    assert step.target.header.part_count == 1


@given(st.permutations(range(5)), st.permutations(range(5)), st.sampled_from([0, 1]))
def test_drafts_are_paired_with_their_own_rows(target_order: list[int], draft_order: list[int], first: int) -> None:
    """Target and draft are paired by step and row, in whatever orders their columns and messages are (case 4)."""
    wanted = [RowShape(key + 10, position=key, tokens=1 + key % 3) for key in range(5)]
    (target,) = parts_of(wanted, target_order, [], step=1, draft_follows=True)
    (draft,) = parts_of(wanted, draft_order, [], step=1, kind=DRAFT)
    made = assembler()
    both = [target, draft]
    made.add(both[first], 0.0)
    assert numbers(made) == []
    made.add(both[1 - first], 0.0)
    step = only(made)
    assert step.draft is not None
    assert made.unpaired is None
    for mine, theirs in zip(step.target.rows(), step.draft.rows(), strict=True):
        assert (mine.request_id, mine.position, mine.batch_index) == (
            theirs.request_id,
            theirs.position,
            theirs.batch_index,
        )


def test_draft_that_nobody_announced_is_waited_for_once_it_began() -> None:
    """Of a draft whose first part is there the others are waited for, whatever the target says of it (case 4)."""
    made = assembler()
    wanted = [RowShape(1), RowShape(2)]
    drafts = parts_of(wanted, [0, 1], [1], kind=DRAFT)
    made.add(drafts[0], 0.0)
    made.add(batch(wanted), 0.0)
    assert numbers(made) == []
    made.add(drafts[1], 0.0)
    step = only(made)
    assert step.draft is not None
    assert step.draft.request_ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("drafted", "field"),
    [
        ([RowShape(1), RowShape(9)], "request_ids"),
        ([RowShape(2), RowShape(1)], "batch_indices"),
        ([RowShape(1), RowShape(2, position=1)], "positions"),
    ],
    ids=["another request", "another place", "another position"],
)
def test_draft_of_other_rows_is_an_error(drafted: list[RowShape], field: str) -> None:
    """A draft that is about other rows than the target's is left out and named; the target comes out (case 4)."""
    made = assembler()
    made.add(batch(row_shapes([1, 2]), draft_follows=True), 0.0)
    draft = batch(drafted, kind=DRAFT)
    made.add(draft, 0.0)
    step = only(made)
    assert step.draft is None
    assert step.target.request_ids.tolist() == [1, 2]
    assert made.unpaired is not None
    assert made.unpaired[0] is draft
    assert made.unpaired[1].field.startswith(field)


def test_missing_part_is_waited_for_until_the_timeout() -> None:
    made = assembler()
    made.add(parts_of(row_shapes([1, 2]), [0, 1], [1], step=1)[1], 10.0)
    for later in (2, 3, 4):  # beyond those for which a draft is waited for
        made.add(batch(row_shapes([3]), step=later), 10.5)
    assert numbers(made, 10.0 + WAIT - 0.01) == []
    step, *whole = made.ready(10.0 + WAIT)
    assert not step.is_whole
    assert step.target.request_ids.tolist() == [2]
    assert [(each.number, each.is_whole) for each in whole] == [(2, True), (3, True), (4, True)]


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_missing_draft_is_waited_for_some_steps(lag: int) -> None:
    made = assembler(draft_lag_steps=lag)
    for number in range(1, 2 + lag):
        made.add(batch(row_shapes([1], position=number), step=number, draft_follows=True), 0.0)
        assert numbers(made) == []
    made.add(batch(row_shapes([1], position=9), step=2 + lag, draft_follows=True), 0.0)
    step = only(made)
    assert (step.number, step.draft) == (1, None)


def test_open_steps_are_bounded() -> None:
    made = assembler(max_open_steps=2)
    for number in (1, 2, 3):
        assert numbers(made) == []
        made.add(parts_of(row_shapes([1, 2], position=number), [0, 1], [1], step=number)[0], 0.0)
    step = only(made)
    assert (step.number, step.is_whole, made.open_steps) == (1, False, 2)


def test_draft_alone_becomes_a_step_without_rows() -> None:
    made = assembler()
    made.add(batch(row_shapes([1]), kind=DRAFT), 0.0)
    step = only(made, WAIT)
    assert not step.is_whole
    assert (step.target.row_count, step.draft) == (0, None)


def test_closing_lets_everything_out() -> None:
    made = assembler()
    made.add(batch(row_shapes([1]), step=2), 0.0)
    made.add(parts_of(row_shapes([1, 2]), [0, 1], [1], step=1)[0], 0.0)
    assert [(step.number, step.is_whole) for step in made.ready(0.0, at_end=True)] == [(1, False), (2, True)]


@pytest.mark.parametrize("is_released", [False, True])
def test_parts_of_other_ranks_are_dropped(is_released: bool) -> None:  # noqa: FBT001 - what differs
    """A repeated part is a duplicate, one with other contents divergent, from any rank; neither is kept (case 6)."""
    made = assembler()
    first = parts_of(row_shapes([1, 2]), [0, 1], [] if is_released else [1], step=1)[0]
    made.add(first, 0.0)
    assert numbers(made) == ([1] if is_released else [])
    same = LogprobBatch.of_views(first.header._replace(tp_rank=1, sequence=9), first.columns)
    other = LogprobBatch.of_views(first.header, first.columns | {"logprobs": first.logprobs - np.float32(1)})
    for part, expected in ((same, ItemOutcome.DUPLICATE), (other, ItemOutcome.DIVERGENT)):
        outcome, pending_ack = made.add(part, 0.0)
        assert outcome is expected
        assert pending_ack.count == 0
    assert made.open_steps == (0 if is_released else 1)


def test_parts_of_long_ago_are_repetitions() -> None:
    made = assembler(max_open_steps=1)
    for number in (1, 2, 3):
        made.add(batch(row_shapes([1], position=number), step=number), 0.0)
        numbers(made)
    other = batch(row_shapes([7]), step=1)
    assert made.add(other, 0.0)[0] is ItemOutcome.DUPLICATE
    assert made.add(batch(row_shapes([7], position=3), step=3), 0.0)[0] is ItemOutcome.DIVERGENT
    assert made.open_steps == 0


def test_late_draft_is_an_error() -> None:
    made = assembler()
    made.add(batch(row_shapes([1]), step=1), 0.0)
    assert numbers(made) == [1]
    with pytest.raises(ContractError, match="an announced draft batch that comes in time"):
        made.add(batch(row_shapes([1]), step=1, kind=DRAFT), 0.0)


CONTRADICTIONS = {
    "part_count": (batch(row_shapes([3]), part=(1, 3), step_rows=4), "header.part_count"),
    "step_rows": (batch(row_shapes([3]), part=(1, 2), step_rows=4), "header.step_rows"),
    "keys": (batch(row_shapes([1]), part=(1, 2), step_rows=3, indices=[2]), "request_ids"),
    "indices": (batch(row_shapes([3]), part=(1, 2), step_rows=3, indices=[1]), "batch_indices"),
    "too few rows": (batch([], part=(1, 2), step_rows=3), "header.step_rows"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_part_that_contradicts_the_others_is_refused(name: str) -> None:
    """A part that disagrees with the step's others is an error, and the step goes on as without it (case 28)."""
    made = assembler()
    part, field = CONTRADICTIONS[name]
    made.add(batch(row_shapes([1, 2]), part=(0, 2), step_rows=3), 0.0)
    with pytest.raises(ContractError) as refused:
        made.add(part, 0.0)
    assert refused.value.field.startswith(field)
    assert numbers(made) == []
    made.add(batch(row_shapes([3]), part=(1, 2), step_rows=3, indices=[2]), 0.0)
    assert only(made).target.request_ids.tolist() == [1, 2, 3]


def test_refused_part_opens_no_step() -> None:
    made = assembler()
    with pytest.raises(ContractError):
        made.add(batch(row_shapes([1, 2]), part=(0, 2), step_rows=1), 0.0)
    assert made.open_steps == 0
