"""Several processors die, stand still and drain while workers move: every request's tokens come once and in order."""

from math import inf
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.in_process.several import SeveralWorld, Site
from tests.in_process.test_state_machine import run
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import ErrorCode

_PLACES = st.integers(0, 7)
_NOT_TAKEN = (ErrorCode.ERROR_CODE_NO_WORKER, ErrorCode.ERROR_CODE_OVERLOADED)
_WORLD: dict[str, Any] = {
    "sites": st.integers(2, 3),
    "clients": st.integers(1, 2),
    "by_columns": st.booleans(),
    "credit": st.sampled_from([4, 64]),
    "window": st.sampled_from([1, 8]),
    "parts": st.integers(1, 3),
    "drafts": st.booleans(),
}
_NO_OVERRIDES: dict[str, object] = {}


class Failover(RuleBasedStateMachine):
    """Whatever happens to processors and connections: no token is lost, repeated or out of order."""

    world: SeveralWorld
    standstill = 5.0
    """How long a request may stand still once the processors stay, in seconds."""

    @initialize(workers=st.integers(1, 3), pairs=st.just(0), **_WORLD)
    def begin(self, credit: int, window: int, **world: Any) -> None:  # noqa: ANN401 - as SeveralWorld has it
        overrides: dict[str, object] = {"processor.credit_items": credit, "client.window_frames": window}
        self.world = SeveralWorld(overrides=overrides, **world)
        self.world.flush()
        self.ask(0, [30, 20, 10])

    def site(self, place: int) -> Site:
        return self.world.sites[place % len(self.world.sites)]

    @rule(client=_PLACES, tokens=st.lists(st.integers(1, 60), min_size=1, max_size=3))
    def ask(self, client: int, tokens: list[int]) -> None:
        for most in tokens:
            if len(self.world.open_requests()) < self.world.places:
                self.world.ask(client, most)

    @rule(place=_PLACES)
    def abort(self, place: int) -> None:
        if found := self.world.open_requests():
            client, asked = found[place % len(found)]
            client.abort(asked)

    @rule(turns=st.integers(1, 4))
    def work(self, turns: int) -> None:
        """Let every engine compute, and carry everything, but leave the last of it on its way to the clients."""
        self.world.work(turns)

    @rule(worker=_PLACES, turns=st.integers(1, 4))
    def turn(self, worker: int, turns: int) -> None:
        for _ in range(turns):
            self.world.workers[worker % len(self.world.workers)].turn()

    @rule(place=_PLACES)
    def carry(self, place: int) -> None:
        self.world.carry(self.site(place))

    @rule(worker=_PLACES, messages=st.integers(1, 3))
    def carry_from(self, worker: int, messages: int) -> None:
        self.world.carry_from(self.world.workers[worker % len(self.world.workers)], messages)

    @rule()
    def carry_all(self) -> None:
        self.world.flush()

    @rule(seconds=st.sampled_from([0.3, 1.1, 3.5, 6.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds, carries=True)

    @rule(place=_PLACES)
    def kill(self, place: int) -> None:
        self.site(place).kill()

    @rule(place=_PLACES)
    def start(self, place: int) -> None:
        self.site(place).start()

    @rule(place=_PLACES)
    def stop(self, place: int) -> None:
        self.site(place).stop()

    @rule(place=_PLACES)
    def go_on(self, place: int) -> None:
        self.site(place).go_on()

    @rule(place=_PLACES, is_slow=st.booleans())
    def drain(self, place: int, *, is_slow: bool) -> None:
        if is_slow:
            self.site(place).drain()
        else:
            self.site(place).close()

    @rule(worker=_PLACES)
    def move(self, worker: int) -> None:
        """Let a worker lose its processor, which only it does not hear."""
        self.world.workers[worker % len(self.world.workers)].move()

    @rule(worker=_PLACES, keeps_unsent=st.booleans())
    def disconnect(self, worker: int, *, keeps_unsent: bool) -> None:
        """Break a worker's connection; it has another to the same processor."""
        self.world.workers[worker % len(self.world.workers)].reconnect(keeps_unsent=keeps_unsent)

    @rule(client=_PLACES, place=_PLACES)
    def disconnect_client(self, client: int, place: int) -> None:
        nodes = self.world.clients[client % len(self.world.clients)].nodes
        nodes[place % len(nodes)].reconnect(keeps_unsent=False)

    @rule()
    def lose_what_was_left(self) -> None:
        for worker in self.world.workers:
            worker.forget_left()

    def teardown(self) -> None:
        """Let everything come to its end, and look at how it did."""
        if hasattr(self, "world"):
            self.world.settle(self.standstill)
            self.world.check_ends()
            self.check_errors()

    def check_errors(self) -> None:
        for asked in self.world.asked:
            if asked.error is not None:
                assert asked.error.code in _NOT_TAKEN, str(asked.error)
                assert not asked.tokens


class HandoffFailover(Failover):
    """Processors alone fail, and requests go from prefill to decode workers: none notices."""

    @initialize(workers=st.integers(0, 1), pairs=st.integers(1, 2), **_WORLD)
    def begin(self, **world: Any) -> None:  # noqa: ANN401 - as above
        """Start everything, with prefill and decode workers: how many sites, workers and pairs, and what happened."""
        super().begin(**world)

    @rule(place=_PLACES)
    def hand_off(self, place: int) -> None:
        self.world.workers[place % len(self.world.workers)].carry_handoffs()


class FaultyFailover(Failover):
    """Workers stand still as well, and all connections together: there may be errors, but no wrong token."""

    standstill = inf

    @rule(seconds=st.sampled_from([0.3, 1.1, 2.5]))
    def pass_time_in_silence(self, seconds: float) -> None:
        self.world.pass_time(seconds, carries=False)

    @rule(worker=_PLACES, is_paused=st.booleans())
    def pause(self, worker: int, *, is_paused: bool) -> None:
        """Let a worker's connection stand still, or go on."""
        node = self.world.workers[worker % len(self.world.workers)]
        node.is_paused = is_paused
        node.pump()

    def check_errors(self) -> None:
        """Assert nothing more: errors are allowed here."""


@pytest.mark.parametrize("machine", [Failover, FaultyFailover, HandoffFailover])
def test_no_failover_makes_a_token_wrong(machine: type[Failover]) -> None:
    """Each request has its tokens, each once and in order, and an end; an error only where too much stands still."""
    run(machine)


def play(machine: Failover, steps: str) -> None:
    """Call a machine's rules by their names: `drain 1 not_is_slow` is `drain(1, is_slow=False)`, `3+4` is a list."""
    for step in steps.split(", "):
        name, *words = step.split()
        flags = {word.removeprefix("not_"): not word.startswith("not_") for word in words if word[0].isalpha()}
        numbers = [
            [float(each) if "." in each else int(each) for each in word.split("+")]
            for word in words[: len(words) - len(flags)]
        ]
        getattr(machine, name)(*(each if len(each) > 1 else each[0] for each in numbers), **flags)
    machine.teardown()


RUNS = {
    "what waits for its client while its worker goes and comes back": (
        "carry_all, turn 0 4, move 0, lose_what_was_left, carry_all, stop 0, drain 1 is_slow, pass_time 3.5, "
        "disconnect_client 0 0"
    ),
    "the same, and the processor restarts": (
        "work 2, turn 0 1, start 1, work 3, move 0, move 0, pass_time 0.3, start 1, turn 0 4"
    ),
    "a worker comes to a processor that had refused its requests": (
        "move 0, pass_time 6.0, work 1, stop 0, pass_time 3.5, move 0"
    ),
    "a processor that wakes up reads what the client said long ago": (
        "pass_time 6.0, move 0, stop 0, work 1, pass_time 3.5, move 0"
    ),
    "the same, of a request whose last row is left": (
        "stop 0, pass_time 1.1, move 0, turn 0 3, move 0, pass_time 1.1, stop 1, move 0, pass_time 6.0, work 3, move 0"
    ),
    "a request is found while its engine computes nothing for long": (
        "work 2, move 0, pass_time 6.0, pass_time 6.0, move 0"
    ),
    "a processor wakes up with requests that it cannot send to the worker that left": "stop 1, pass_time 3.5",
    "a worker comes to the next life of a processor that refused its requests because it closed": (
        "move 0, move 0, drain 1 is_slow, carry_all, move 0, move 0"
    ),
}
"""What happened in runs that lost a request once, at one worker, a client and two processors."""


@pytest.mark.parametrize("steps", RUNS.values(), ids=RUNS)
def test_runs_that_lost_a_request_once(steps: str) -> None:
    machine = Failover()
    machine.begin(sites=2, workers=1, clients=1, credit=64, window=8, by_columns=True)
    play(machine, steps)
    assert all(asked.error is None for asked in machine.world.asked)


HANDOFF_RUNS = {
    "a prefill worker begins, and comes where the decode worker is": (
        (2, 0, 1),
        "carry_all, carry_all, carry_all, kill 7",
    ),
    "the decode worker has done all before the prefill worker comes back": (
        (2, 0, 1),
        "carry_all, disconnect 6 not_keeps_unsent, move 6",
    ),
    "a prefill worker goes to and fro with what its client has": ((2, 0, 1), "work 2, move 4"),
    "a request waits at a processor until its time is over": ((2, 0, 1), "ask 6 24+11, pass_time 6.0"),
    "a client finds a request that was handed off unseen": (
        (3, 0, 2),
        "drain 7 not_is_slow, pass_time 3.5, move 4, pass_time 0.3",
    ),
    "an error comes behind the rows that came before it": ((3, 1, 2), "pass_time 3.5, start 3"),
    "a request that was sent anew is handed off, and its first row comes again": (
        (3, 0, 2),
        "drain 5 not_is_slow, kill 6, move 5, pass_time 6.0, work 4, kill 7, pass_time 1.1",
    ),
    "all processors close before one is there again": (
        (2, 0, 1),
        "work 3, drain 3 is_slow, pass_time 6.0, drain 2 is_slow, pass_time 3.5",
    ),
    "a processor reads a new request when its worker has it from another one": (
        (2, 1, 1),
        "work 2, stop 7, ask 4 42+40+52, abort 3, pass_time 3.5, pass_time 3.5, work 2, move 3",
    ),
    "a processor wakes up with a request of which the decode worker has come": (
        (2, 1, 2),
        "stop 6, ask 6 42+28+30, pass_time 3.5, pass_time 3.5, move 2",
    ),
    "a prefill worker brings again what its client had long ago": (
        (2, 1, 2),
        "stop 5, work 4, work 1, work 4, kill 0, pass_time 6.0",
    ),
    "a processor that stood still has it queued, and gets the decode worker that goes on with it": (
        (3, 0, 1),
        "work 4, kill 2, stop 6, pass_time 6.0, kill 4, ask 4 20+44+60, move 1",
    ),
}
"""Sites, workers and pairs, and what happened in runs that lost or stranded a request once."""


@pytest.mark.parametrize(("world", "steps"), HANDOFF_RUNS.values(), ids=HANDOFF_RUNS)
@pytest.mark.parametrize("credit", [4, 64])
def test_runs_that_stranded_a_request_once(world: tuple[int, int, int], steps: str, credit: int) -> None:
    machine, (sites, workers, pairs) = HandoffFailover(), world
    machine.begin(sites=sites, workers=workers, pairs=pairs, clients=1, credit=credit, window=8, by_columns=False)
    play(machine, steps)


def begun(sites: int = 2, workers: int = 2, requests: int = 6, tokens: int = 120) -> SeveralWorld:
    """Return a world in which every request has had some of its tokens."""
    world = SeveralWorld(sites, workers, 1, by_columns=True, overrides=_NO_OVERRIDES)
    world.flush()
    world.pass_time(0.3, carries=True)
    for _ in range(requests):
        world.ask(0, tokens)
    world.work(6)
    assert all(0 < len(asked.tokens) < tokens for asked in world.asked)
    return world


def all_finished(world: SeveralWorld) -> None:
    """Let everything come to its end, and fail unless each request has all of its tokens."""
    world.settle()
    world.check_ends()
    assert world.errors() == []
    assert {asked.status for asked in world.asked} == {RowStatus.FINISHED_LENGTH}


def used(world: SeveralWorld) -> Site:
    return next(worker.site for worker in world.workers if worker.publisher.session.requests)


@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize("how", ["kill", "stop", "close", "drain"])
def test_requests_of_a_processor_that_is_gone_go_on_at_another(how: str, sites: int) -> None:
    world = begun(sites)
    site = used(world)
    getattr(site, how)()
    for _ in range(40):
        world.work(2)
        world.pass_time(0.25, carries=True)
    assert all(worker.site is not site for worker in world.workers)
    assert {asked.status for asked in world.asked} == {RowStatus.FINISHED_LENGTH}, world.errors()
    all_finished(world)


def test_requests_of_a_lost_worker_end_with_an_error_that_counts() -> None:
    world = begun(workers=2, tokens=600)
    lost = next(worker for worker in world.workers if worker.publisher.session.requests)
    ids = set(lost.publisher.session.requests)
    lost.is_paused = True
    for _ in range(60):
        for worker in world.workers:
            if worker is not lost:
                worker.turn()
        world.pass_time(0.25, carries=True)
    failed = {asked.key: asked for asked in world.asked if asked.error is not None}
    assert set(failed) == ids
    assert {asked.error.code for asked in failed.values() if asked.error} == {ErrorCode.ERROR_CODE_WORKER_LOST}
    world.check_ends()
