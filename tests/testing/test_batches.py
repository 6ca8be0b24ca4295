"""Builders of batches, and the golden messages: what they make, the contract takes, or refuses as it says."""

from hypothesis import given, settings
from hypothesis import strategies as st

import tokenbus
from tokenbus import testing
from tokenbus_contracts import RowStatus, Scoring

_UNUSUAL = (RowStatus.UNSPECIFIED, RowStatus.UNRECOVERABLE)
_TOKENLESS = (RowStatus.IDLE, RowStatus.PREFILLING, RowStatus.PREEMPTED, RowStatus.ABORTED)


@st.composite
def shapes(draw: st.DrawFn) -> testing.RowShape:
    status = draw(st.sampled_from([each for each in RowStatus if each not in _UNUSUAL]))
    least = 1 if status is RowStatus.ACTIVE else 0
    tokens = 0 if status in _TOKENLESS else draw(st.integers(least, 8))
    scoring = draw(st.sampled_from([Scoring.FULL, Scoring.NONE]))
    may_propose = status in {RowStatus.ACTIVE, RowStatus.HANDED_OFF}
    return testing.RowShape(
        draw(st.integers(1, 2**64 - 1)),
        draw(st.integers(0, 1000)),
        tokens,
        status,
        scoring,
        top_k=draw(st.integers(0, 20)) if scoring is Scoring.FULL else 0,
        drafted=draw(st.none() | st.integers(0, 8)),
        proposals=draw(st.none() | st.integers(0, 8)) if may_propose else None,
    )


@settings(max_examples=30)
@given(rows=st.lists(shapes(), max_size=12, unique_by=lambda row: row.request_id), data=st.data())
def test_batch_of_any_shape_is_valid(rows: list[testing.RowShape], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(rows))))
    made = testing.batch(rows, indices=order, step=3, sequence=9, worker_id="w", epoch=2)
    read = tokenbus.decode(tokenbus.encode(made))
    assert read == made
    assert [row.request_id for row in read.in_batch_order().rows()] == [
        rows[place].request_id for place in sorted(range(len(rows)), key=order.__getitem__)
    ]
    for row, shape in zip(read.rows(), rows, strict=True):
        true = testing.true_tokens(shape.request_id, shape.position, shape.position + shape.tokens)
        assert row.token_ids.tolist() == true.ids.tolist()
        assert shape.proposals in {None, row.proposal_token_ids.size}
