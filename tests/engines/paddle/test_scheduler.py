"""Scheduler: who is computed in a step, and who waits."""

import numpy as np

from tests.engines.paddle.driver import text_request
from tokenbus_engines.emission import batch_order
from tokenbus_engines.paddle import PaddleOptions
from tokenbus_engines.paddle.requests import Handed, Request, request_of
from tokenbus_engines.paddle.scheduler import Plan, Scheduler


def add(scheduler: Scheduler, *keys: int, prompt: str = "abc") -> list[Request]:
    """Let requests wait for a slot, and return them; each prompt has one token more."""
    made = [request_of(text_request(key, prompt), PaddleOptions()) for key in keys]
    for request in made:
        scheduler.add(request)
    return made


def compute(plan: Plan) -> None:
    """Do what an engine does with a plan: every row gets what it was planned for."""
    for chunk in plan.chunks:
        chunk.request.computed = chunk.end
        if chunk.gives_token:
            chunk.request.append(0)
    for request in plan.decoding:
        request.append(0)
        request.computed = request.to_compute


def keys(requests: list[Request]) -> list[int]:
    """Return the keys of requests."""
    return [request.key for request in requests]


def test_no_more_run_than_there_are_slots() -> None:
    """Requests beyond the slots wait, in the order in which they came, and no two share a slot."""
    scheduler = Scheduler(2, 100, 0)
    first, second, third = add(scheduler, 1, 2, 3)
    plan = scheduler.plan()
    assert keys([chunk.request for chunk in plan.chunks]) == [1, 2]
    assert {first.slot, second.slot} == {0, 1}
    assert third.slot is None
    compute(plan)
    freed = first.slot
    scheduler.end(first)
    plan = scheduler.plan()
    assert keys(plan.decoding) == [2]
    assert keys([chunk.request for chunk in plan.chunks]) == [3]
    assert third.slot == freed


def test_prompts_are_computed_in_chunks_of_one_budget() -> None:
    """A step computes no more tokens of prompts than it may, the oldest's first, and a token comes at the end."""
    scheduler = Scheduler(4, 5, 0)
    add(scheduler, 1, 2, 3)
    planned = []
    while any(not request.output for request in scheduler._requests.values()):
        plan = scheduler.plan()
        planned.append([(chunk.request.key, chunk.begin, chunk.end, chunk.gives_token) for chunk in plan.chunks])
        compute(plan)
    assert planned == [
        [(1, 0, 4, True), (2, 0, 1, False)],
        [(2, 1, 4, True), (3, 0, 2, False)],
        [(3, 2, 4, True)],
    ]


def test_who_ran_longest_makes_way_for_who_waits() -> None:
    """After its slice a request gives its slot to one that waits, is told so once, and is computed anew later."""
    scheduler = Scheduler(1, 100, 1)
    add(scheduler, 1, 2)
    seen = []
    for _ in range(7):
        plan = scheduler.plan()
        seen.append((keys(plan.preempted), keys(plan.decoding), [chunk.gives_token for chunk in plan.chunks]))
        compute(plan)
    assert seen == [
        ([], [], [True]),
        ([], [1], []),
        ([1], [], [True]),
        ([], [2], []),
        ([2], [], [False]),
        ([], [1], []),
        ([1], [], [False]),
    ]


def test_who_is_computed_anew_is_not_sent_away_before_it_got_a_token() -> None:
    """A request whose text takes more steps to compute than its slice has still gets on, and ends."""
    scheduler = Scheduler(1, 2, 1)
    requests = add(scheduler, 1, 2, prompt="0123456789")
    for _ in range(200):
        compute(scheduler.plan())
    assert all(request.position > 5 for request in requests)


def test_no_request_is_preempted_where_none_waits() -> None:
    """A request keeps its slot as long as there is one for each."""
    scheduler = Scheduler(2, 100, 1)
    add(scheduler, 1, 2)
    for _ in range(5):
        plan = scheduler.plan()
        assert not plan.preempted
        compute(plan)


def test_aborted_request_is_gone_wherever_it_was() -> None:
    """A request ends at the next step, running or waiting, and its slot is free; one that is unknown needs no end."""
    scheduler = Scheduler(1, 100, 0)
    add(scheduler, 1, 2, 3)
    compute(scheduler.plan())
    for key in (1, 3, 99):
        scheduler.abort(key)
    plan = scheduler.plan()
    assert keys(plan.aborted) == [1, 3]
    assert keys([chunk.request for chunk in plan.chunks]) == [2]
    assert 1 not in scheduler
    scheduler.abort(2)
    scheduler.plan()
    assert not scheduler.has_work


def test_what_was_handed_over_is_kept_for_as_many_as_there_are_slots() -> None:
    """States that wait for a slot are bounded in number: beyond it a request is computed anew instead."""
    scheduler = Scheduler(2, 100, 0)
    made = [request_of(text_request(key, "abc"), PaddleOptions()) for key in range(1, 5)]
    for request in made:
        request.append(0)
        request.handed = Handed(np.zeros(0, np.float32), np.zeros(0, np.float32))
        scheduler.add(request)
    assert [request.handed is not None for request in made] == [True, True, False, False]
    plan = scheduler.plan()
    assert keys(plan.decoding) == [1, 2]
    for request in plan.decoding:
        scheduler.end(request)
    assert [(chunk.request.key, chunk.end, chunk.gives_token) for chunk in scheduler.plan().chunks] == [
        (3, 4, False),
        (4, 4, False),
    ]


def test_places_are_those_of_admission() -> None:
    """Rows in whatever order are told their places in the batch, which is in the order of admission (case 3)."""
    requests = add(Scheduler(4, 100, 0), 30, 10, 20)
    one, two, three = (request.serial for request in requests)
    places = batch_order(np.array([three, one, two]))
    assert places is not None
    assert places.tolist() == [2, 0, 1]
    assert batch_order(np.array([one, two, three])) is None


def test_plan_whose_step_failed_ends_its_aborted_requests_later() -> None:
    """What a failed step would have ended or computed is in the plan of the next one, and no slot is lost."""
    scheduler = Scheduler(1, 100, 0)
    first, second = add(scheduler, 1, 2)
    scheduler.abort(1)
    failed = scheduler.plan()
    scheduler.undo(failed)
    plan = scheduler.plan()
    assert plan.aborted == failed.aborted == [first]
    assert plan.chunks == failed.chunks
    assert [chunk.request for chunk in plan.chunks] == [second]
    assert second.slot == 0
