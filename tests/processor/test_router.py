"""Router: each row is settled against what its request has had, and goes to its consumer exactly once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.in_process.builders import ids
from tests.processor.settling import Arrival, Model, Recorder, Table, draft_for
from tokenbus.processor.requests import State
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import RowStatus, Scoring
from tokenbus_contracts.generated.request_pb2 import ErrorCode

REQUESTS = {11: 0, 12: 0, 13: 1, 14: 0, 15: 1}
ACTIVE, FINISHED = RowStatus.ACTIVE, RowStatus.FINISHED_LENGTH
PREEMPTED, PREFILLING = RowStatus.PREEMPTED, RowStatus.PREFILLING

_row = st.tuples(
    st.sampled_from([*REQUESTS]),
    st.sampled_from([0, 0, 0, 0, -1, -2, 1, 3]),
    st.integers(0, 3),
    st.sampled_from([ACTIVE] * 8 + [FINISHED, RowStatus.ABORTED]),
    st.integers(0, 2),
)
_step = st.tuples(st.integers(0, 2), st.lists(_row, max_size=5, unique_by=lambda row: row[0]), st.booleans())


def tokens_of(recorder: Recorder, key: int) -> list[int]:
    return [token for row in recorder.rows if row[0] == key for token in row[6]]


@pytest.mark.long
@settings(max_examples=80)
@given(st.lists(_step, max_size=25))
def test_rows_are_settled_as_a_slow_model_says(
    steps: list[tuple[int, list[tuple[int, int, int, RowStatus, int]], bool]],
) -> None:
    """Repeated, early, late, overlapping and foreign rows of several streams: exactly once, in order.

    Each row that is handed out has every one of its own values (case 1, 14), late ones (case 22) too. What was drafted
    stays with the row that it is about (case 4). At the end no consumer holds a step.
    """
    table, model = Table(REQUESTS), Model(REQUESTS)
    made = []
    for number, (stream, drawn, has_draft) in enumerate(steps, 1):
        wanted = []
        for key, offset, count, status, top_k in drawn:
            tokens = 0 if status is RowStatus.ABORTED else count
            usual = RowStatus.IDLE if status is ACTIVE and not tokens else status
            position = max(0, model.requests[key].next + offset)
            wanted.append(RowShape(key, position, tokens, usual, Scoring.FULL, top_k))
        draft = draft_for(wanted, number) if has_draft else None
        made.append(table.route(batch(wanted, step=number), stream, draft))
        for index, row in enumerate(wanted):
            model.arrive(Arrival(stream, row, index, len(wanted)))
    handed_out = table.rows()
    for key, plain in model.requests.items():
        assert [row for row in handed_out if row[0] == key] == plain.rows
        tokens_found = [token for row in plain.rows for token in row[6]]
        assert tokens_found == ids(key, 0, plain.next)
    assert table.ends() == {key: plain.end for key, plain in model.requests.items() if plain.end}
    places = {(row[0], row[2]) for row in handed_out}
    assert {(row[0], row[2]) for row in table.drafts()} <= places
    for request in table.registry.table.open_requests():
        table.registry.fail(request, ErrorCode.ERROR_CODE_INTERNAL, "the test is over")
    assert [step.pending_ack.count for step in made] == [1] * len(made)


def test_hole_in_a_streams_rows_ends_the_request_and_says_what_is_lost() -> None:
    """A row that skips tokens ends its request with an error that names them; its neighbours go on (case 14, 21)."""
    table = Table({1: 0, 2: 0}, routes=1)
    table.route(batch([RowShape(1, 0, 2), RowShape(2, 0, 2)]), 0)
    table.route(batch([RowShape(1, 3, 1), RowShape(2, 2, 1)], step=2), 0)
    error = table.recorders[1].failed[1]
    assert (error.code, error.emitted_tokens) == (ErrorCode.ERROR_CODE_GAP, 2)
    assert error.message == "tokens 2 to 2 never came from worker-0/7"
    assert table.aborted == [(0, 1)]
    assert tokens_of(table.recorders[1], 2) == ids(2, 0, 3)


def test_request_that_begins_here_waits_for_who_will_ask() -> None:
    table = Table({})
    for number, row in enumerate([RowShape(99, 0, 2), RowShape(99, 2, 1, FINISHED)], 1):
        table.route(batch([row], step=number), 0)
    request = table.registry.table.get(99)
    assert request is not None
    assert table.registry.table.state[request.slot] == State.ENDED
    assert len(request.waiting) == table.registry.table.buffered_rows == 2
