"""A request's states: only the table's methods change one, and each only from the states that it may follow."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.in_process.builders import generate_of
from tests.processor.settling import source
from tokenbus.processor.requests import NO_STREAM, UNCLAIMED, Deadline, Request, RequestTable, State, TransitionError

ID, DEADLINE = 7, Deadline(1.0)
CLOSED, QUEUED, RUNNING, RESUMED, ENDED = State

Change = Callable[[RequestTable, Request], object]
OPENING: dict[str, tuple[Callable[[RequestTable], Request], State]] = {
    "queue": (lambda table: table.submit(generate_of(ID), NO_STREAM, 1, 5, DEADLINE), QUEUED),
    "dispatch": (lambda table: table.submit(generate_of(ID), 0, 1, 5, DEADLINE), RUNNING),
    "open unclaimed": (lambda table: table.open_unclaimed(ID, 9, source(0), DEADLINE, UNCLAIMED), RUNNING),
    "resume": (lambda table: table.resume(ID, 3, 0.0), RESUMED),
}
CHANGES: dict[str, tuple[Change, dict[State, State]]] = {
    "dispatch": (lambda table, request: table.dispatch(request, 1), {QUEUED: RUNNING}),
    "requeue": (lambda table, request: table.requeue(request), {RUNNING: QUEUED}),
    "assign": (lambda table, request: table.assign(request, 2), {QUEUED: RUNNING, RESUMED: RUNNING}),
    "end": (lambda table, request: table.end(request, None), {RUNNING: ENDED}),
    "close": (lambda table, request: table.close(request, None), dict.fromkeys(set(State) - {CLOSED}, CLOSED)),
}  # fmt: skip


@given(st.sampled_from([*OPENING]), st.lists(st.sampled_from([*CHANGES]), max_size=30))
def test_random_walks_stay_in_the_table(opening: str, changes: list[str]) -> None:
    table = RequestTable(4, 4, 4)
    open_one, state = OPENING[opening]
    request = open_one(table)
    for name in changes:
        change, allowed = CHANGES[name]
        stream = table.stream_of(request)
        if state in allowed:
            change(table, request)
            state = allowed[state]
        else:
            with pytest.raises(TransitionError):
                change(table, request)
            assert table.stream_of(request) == stream
        assert table.state_of(request) is state
        assert (table.get(ID) is request) == (state is not CLOSED)
        if state is CLOSED:
            break
        assert (table.stream_of(request) == NO_STREAM) or state is RUNNING
        assert (table.stream_of(request) != NO_STREAM) or state is not RUNNING


def test_request_that_is_closed_cannot_change() -> None:
    table = RequestTable(4, 4, 4)
    open_one, _ = OPENING["dispatch"]
    request = open_one(table)
    table.close(request, None)
    again = open_one(table)
    assert again.slot == request.slot
    with pytest.raises(TransitionError, match="request 0000000000000007: running does not follow closed"):
        table.assign(request, 0)
    assert table.state_of(again) is RUNNING
