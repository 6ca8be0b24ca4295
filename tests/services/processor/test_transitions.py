"""A request's states and transitions: one table, one module that follows it, and a page that shows it."""

import ast
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.services.builders import generate_of
from tests.services.processor.settling import source
from tokenbus_services.processor.requests import (
    NO_STREAM,
    TRANSITIONS,
    Deadline,
    Event,
    Request,
    RequestTable,
    State,
    TransitionError,
    state_after,
)

ROOT = Path(__file__).parents[3]
PROCESSOR = ROOT / "services" / "tokenbus_services" / "processor"
ID, DEADLINE = 7, Deadline(1.0)
COLUMNS = {"next_position", "stream", "handoff_target", "state", "route", "wants_draft", "due", "contexts"}
MUTATING = {"append", "clear", "extend", "insert", "pop", "remove", "CopyFrom", "ClearField", "MergeFrom"}

Change = Callable[[RequestTable, Request], object]
OPENING: dict[Event, Callable[[RequestTable], Request]] = {
    Event.QUEUE: lambda table: table.submit(generate_of(ID), NO_STREAM, 1, 5, DEADLINE),
    Event.DISPATCH: lambda table: table.submit(generate_of(ID), 0, 1, 5, DEADLINE),
    Event.APPEAR: lambda table: table.appear(ID, 0, source(0), DEADLINE, 1, is_midway=False, is_claimed=False),
    Event.APPEAR_MIDWAY: lambda table: table.appear(ID, 9, source(0), DEADLINE, 1, is_midway=True, is_claimed=False),
}
CHANGES: dict[Event, Change] = {
    Event.DISPATCH: lambda table, request: table.dispatch(request, 1),
    Event.GIVE_BACK: lambda table, request: table.give_back(request),
    Event.BEGIN: lambda table, request: table.begin(request, 1),
    Event.RESUME: lambda table, request: table.resume(request, 3, 0.0),
    Event.RESUME_RUNNING: lambda table, request: table.resume(request, 3, 0.0),
    Event.VOUCH: lambda table, request: table.vouch(request, 1),
    Event.DISOWN: lambda table, request: table.disown(request, 1, 2.0),
    Event.HAND_OFF: lambda table, request: table.hand_off(request, 0.0),
    Event.CONTINUE: lambda table, request: table.go_on(request, 2),
    Event.END: lambda table, request: table.end(request),
    Event.CLOSE: lambda table, request: table.close(request, None),
}


def resumed_as(table: RequestTable, request: Request) -> Event:
    """Return which of the two ways of resuming a request has, which depends on whether a stream has it."""
    return Event.RESUME if table.stream_of(request) == NO_STREAM else Event.RESUME_RUNNING


@given(st.sampled_from([*OPENING]), st.lists(st.sampled_from([*CHANGES]), max_size=30))
def test_random_walks_stay_in_the_table(opening: Event, events: list[Event]) -> None:
    """Whatever happens to a request in whatever order, it goes where the table says, or the change raises.

    A change that raises leaves the request as it was.
    """
    table = RequestTable(4, 4)
    request = OPENING[opening](table)
    state = state_after(State.CLOSED, opening)
    for drawn in events:
        event = resumed_as(table, request) if drawn in (Event.RESUME, Event.RESUME_RUNNING) else drawn
        stream = table.stream_of(request)
        if state in TRANSITIONS[event]:
            CHANGES[event](table, request)
            state = TRANSITIONS[event][state]
        else:
            with pytest.raises(TransitionError):
                CHANGES[event](table, request)
            assert table.stream_of(request) == stream
        assert table.state_of(request) is state
        assert (table.get(ID) is request) == (state is not State.CLOSED)
        if state is State.CLOSED:
            break
        assert (table.stream_of(request) == NO_STREAM) or state in (State.RUNNING, State.ORPHANED)
        assert (table.stream_of(request) != NO_STREAM) or state is not State.RUNNING


def test_every_state_can_be_reached_and_left() -> None:
    """No state is a dead end, and none is there that no request comes to."""
    reached = {after for transitions in TRANSITIONS.values() for after in transitions.values()}
    left = {before for transitions in TRANSITIONS.values() for before in transitions}
    assert reached == left == set(State)
    assert set(TRANSITIONS) == set(Event)


def test_request_that_is_closed_cannot_change() -> None:
    """A closed request changes no more, even where another one has its slot by now; the error says what was wrong."""
    table = RequestTable(4, 4)
    request = OPENING[Event.DISPATCH](table)
    table.close(request, None)
    again = OPENING[Event.DISPATCH](table)
    assert again.slot == request.slot
    with pytest.raises(TransitionError, match="request 0000000000000007: hand_off is not allowed while closed"):
        table.hand_off(request, 0.0)
    assert table.state_of(again) is State.RUNNING


def _changes_in(tree: ast.AST) -> list[str]:
    """Return the places of a module that change an attribute of a request or a value of the table's columns."""
    attributes = {field.name for field in fields(Request)}
    found = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = [*node.targets]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATING:
            held = node.func.value
            if isinstance(held, ast.Attribute) and held.attr in ("early", "generate"):
                found.append(ast.unparse(node))
        for target in [each for outer in targets for each in ast.walk(outer)]:
            if isinstance(target, ast.Attribute) and target.attr in attributes:
                is_own = ast.unparse(target).startswith("self.")
                found += [] if is_own or isinstance(target.ctx, ast.Load) else [ast.unparse(node)]
            if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Attribute):
                found += [ast.unparse(node)] if target.value.attr in COLUMNS else []
    return found


def test_only_the_table_changes_requests() -> None:
    """No other module of the processor assigns to an attribute of a request, or to a column of the table."""
    found = {path.name: _changes_in(ast.parse(path.read_text())) for path in PROCESSOR.glob("*.py")}
    assert found.pop("requests.py")
    assert {name: changes for name, changes in found.items() if changes} == {}
