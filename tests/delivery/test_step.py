"""Step: what one forward pass emitted, in the order in which it came and in that of the batch."""

from tests.in_process.builders import step_of
from tokenbus.testing import batch, row_shapes
from tokenbus_contracts import BatchKind


def test_rows_are_put_in_batch_order_where_somebody_looks() -> None:
    """The rows stay in the order in which they came, and are shown in original batch order, drafts too (case 3)."""
    target = batch(row_shapes([7, 8, 9]), indices=[2, 0, 1])
    draft = batch(row_shapes([7, 8, 9]), indices=[2, 0, 1], kind=BatchKind.DRAFT)
    step = step_of(target, draft)
    assert step.rows.request_ids.tolist() == [7, 8, 9]
    assert step.target.request_ids.tolist() == [8, 9, 7]
    assert step.draft is not None
    assert step.draft.request_ids.tolist() == [8, 9, 7]
    assert step.target is step.target


def test_rows_that_were_taken_out_are_not_shown() -> None:
    step = step_of(batch(row_shapes([7, 8])), batch(row_shapes([7, 8]), kind=BatchKind.DRAFT))
    assert step.target.row_count == 2
    assert step.draft is not None
    step.keep(step.rows.select([1]), None)
    assert step.target.request_ids.tolist() == [8]
    assert step.draft is None
