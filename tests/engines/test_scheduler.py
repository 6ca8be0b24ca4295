"""Scheduler: which requests are computed in a step, and which wait."""

import numpy as np

from tests.engines.runs import asked
from tokenbus.engines.admission import request_of
from tokenbus.engines.paddle import ByteTokenizer
from tokenbus.engines.requests import Requests
from tokenbus.engines.sampling import Ids
from tokenbus.engines.scheduler import Plan, Scheduler


class Scheduled:
    def __init__(self, *keys: int, prompt: str = "abc", **options: int) -> None:
        """Let requests wait for a place; each prompt has one token more."""
        self.requests = Requests()
        usual = {"max_running": 256, "prefill_chunk": 100, "slice_steps": 0}
        self.scheduler = Scheduler(self.requests, **usual | options)
        for key in keys:
            made = request_of(asked(key, prompt), ByteTokenizer(), context=2048, max_top_logprobs=20)
            self.scheduler.add(self.requests.add(made))

    def slots(self, *keys: int) -> Ids:
        return np.array([self.requests.slot(key) for key in keys], np.int64)

    def keys(self, slots: Ids) -> list[int]:
        found: list[int] = self.requests.request_ids[slots].tolist()
        return found

    def places(self, *keys: int) -> set[int]:
        return set(self.requests.places[self.slots(*keys)].tolist())

    def compute(self, plan: Plan, *ended: int) -> Plan:
        self.requests.positions[plan.decode] += 1
        self.requests.positions[plan.first] += 1
        gone = self.slots(*ended)
        self.scheduler.advance(plan, gone)
        self.requests.remove(np.concatenate([gone, plan.aborted]))
        return plan

    def chunks(self, plan: Plan) -> list[tuple[int, int, bool]]:
        """Return whose tokens are computed, how many, and whether a first token follows."""
        gives_token = np.isin(plan.computing, plan.first)
        return list(zip(self.keys(plan.computing), plan.sizes.tolist(), gives_token.tolist(), strict=True))


def test_no_more_run_than_there_are_places() -> None:
    run = Scheduled(1, 2, 3, max_running=2)
    plan = run.scheduler.plan()
    assert run.keys(plan.first) == [1, 2]
    assert run.places(1, 2) == {0, 1}
    freed = run.places(1)
    run.compute(plan, 1)
    plan = run.scheduler.plan()
    assert run.keys(plan.decode) == [2]
    assert run.keys(plan.first) == [3]
    assert run.places(3) == freed


def test_prompts_are_computed_in_chunks_of_one_budget() -> None:
    run = Scheduled(1, 2, 3, prefill_chunk=5)
    planned = [run.chunks(run.compute(run.scheduler.plan())) for _ in range(3)]
    assert planned == [[(1, 4, True), (2, 1, False)], [(2, 3, True), (3, 2, False)], [(3, 2, True)]]


def test_who_ran_longest_makes_way_for_who_waits() -> None:
    run = Scheduled(1, 2, max_running=1, slice_steps=1)
    seen = []
    for _ in range(7):
        plan = run.compute(run.scheduler.plan())
        seen.append((run.keys(plan.preempted), run.keys(plan.decode), [gives for *_, gives in run.chunks(plan)]))
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
    """A request whose text takes more steps to compute than its slice has still gets on."""
    run = Scheduled(1, 2, prompt="0123456789", max_running=1, prefill_chunk=2, slice_steps=1)
    for _ in range(200):
        run.compute(run.scheduler.plan())
    assert (run.requests.positions[run.slots(1, 2)] > 5).all()
    run = Scheduled(1, 2, max_running=2, slice_steps=1)  # none waits: none is preempted
    assert not any(run.compute(run.scheduler.plan()).preempted.size for _ in range(5))


def test_aborted_request_is_gone_wherever_it_was() -> None:
    run = Scheduled(1, 2, 3, max_running=1)
    run.compute(run.scheduler.plan())
    for slot in run.slots(1, 3).tolist():
        run.scheduler.abort(slot)
    plan = run.scheduler.plan()
    assert run.keys(plan.aborted) == [1, 3]
    assert run.keys(plan.first) == [2]
    run.compute(plan)
    assert run.requests.slot(1) is None
    run.scheduler.abort(int(run.slots(2)[0]))
    run.compute(run.scheduler.plan())
    assert not len(run.requests)
