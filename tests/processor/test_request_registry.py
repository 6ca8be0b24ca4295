"""RequestRegistry: how requests begin, change hands and end, and how long each of these may take."""

import pytest

from tests.in_process.builders import generate_of
from tests.processor.settling import Table, source
from tokenbus.delivery import Step
from tokenbus.processor.requests import NO_OWNER, UNCLAIMED, UNROUTED, Request, State
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.client_pb2 import Resume
from tokenbus_contracts.generated.request_pb2 import ErrorCode, RequestError

FINISHED = RowStatus.FINISHED_LENGTH
ROUTE = 1


def known(table: Table, key: int) -> Request:
    request = table.registry.table.get(key)
    assert request is not None
    return request


def state(table: Table, key: int) -> State:
    return State(table.registry.table.state[known(table, key).slot])


def pass_time(table: Table, seconds: float) -> None:
    table.clock.advance(seconds)
    table.registry.expire()


class Claim:
    def __init__(self, table: Table, key: int, position: int = 0) -> None:
        registry, self._recorder, self._key = table.registry, table.recorders[ROUTE], key
        resume = Resume(request_id=key, next_position=position, include_draft_logprobs=True)
        request = registry.claim(resume, ROUTE, NO_OWNER)
        self._error = request.error
        self._waited: list[tuple[int, int]] = []
        for step, place in registry.table.take_rows(request):
            row = step.rows.row(place)
            self._waited.append((row.position, row.token_ids.size))
            step.pending_ack.release()

    @property
    def error(self) -> RequestError | None:
        return self._error or self._recorder.failed.get(self._key)

    @property
    def positions(self) -> list[tuple[int, int]]:
        return self._waited + [(row[2], len(row[6])) for row in self._recorder.rows if row[0] == self._key]


def come(
    table: Table, key: int, *begins: int, stream: int = 0, resumed: bool = True, has: tuple[int, ...] = ()
) -> list[Step]:
    made = [batch([RowShape(key, begin, 3)], step=begin + 1) for begin in begins]
    return [table.route(each, stream, is_resumed=resumed, has=has) for each in made]


# How they begin.


@pytest.mark.parametrize("is_resumed", [False, True])
def test_middle_of_a_request_is_kept_only_where_its_beginning_may_have_been_elsewhere(*, is_resumed: bool) -> None:
    table = Table({})
    (step,) = come(table, 9, 6, resumed=is_resumed)
    assert step.pending_ack.count == 1 + is_resumed
    if is_resumed:
        assert state(table, 9) is State.RUNNING
        assert len(known(table, 9).waiting) == 1
    else:
        assert table.registry.table.get(9) is None
        assert table.aborted == [(0, 9)]


# How they change hands.


def test_waiting_rows_go_to_who_asks() -> None:
    """A request whose rows waited is taken over from a position on: nothing lost, and nothing twice (case 22)."""
    table = Table({})
    come(table, 9, 6, 9, 12)
    claim = Claim(table, 9, 6)
    assert claim.positions == [(6, 3), (9, 3), (12, 3)]
    come(table, 9, 15)
    assert claim.positions[-1] == (15, 3)
    assert table.registry.table.stream[known(table, 9).slot] == 0


def test_second_worker_that_says_it_has_a_request_is_told_to_end_it() -> None:
    table = Table({1: 0})
    table.registry.on_worker_has(1, source(1))
    assert table.aborted == [(1, 1)]
    assert table.registry.table.stream[known(table, 1).slot] == 0
    table.registry.on_worker_has(1, source(0))


def test_ended_request_is_ended_at_the_worker_that_still_has_it() -> None:
    table = Table({1: 0})
    table.registry.fail(known(table, 1), ErrorCode.ERROR_CODE_WORKER_LOST, "lost", tell_worker=False)
    table.registry.on_worker_has(1, source(0))
    assert table.aborted == [(0, 1)]
    assert table.registry.table.get(1) is None


# How long they may take.


@pytest.mark.parametrize(("asked_ms", "seconds"), [(0, 600.0), (2000, 2.0), (700_000, 600.0)])
def test_deadline(asked_ms: int, seconds: float) -> None:
    """A request ends at its own deadline or the processor's, whichever is earlier, and not a moment before."""
    table = Table({})
    table.registry.submit(generate_of(1, deadline_ms=asked_ms), 0, ROUTE, NO_OWNER)
    pass_time(table, seconds - 0.01)
    assert table.ends() == {}
    pass_time(table, 0.01)
    assert table.recorders[ROUTE].failed[1].code == ErrorCode.ERROR_CODE_DEADLINE
    assert table.aborted == [(0, 1)]


def test_aborted_request_is_waited_for_and_then_given_up() -> None:
    table = Table({1: 0}, abort_timeout_ms=5000)
    table.registry.abort(1)
    table.clock.advance(1.0)
    table.registry.abort(1)
    table.registry.abort(99)
    assert table.aborted == [(0, 1)]
    pass_time(table, 3.99)
    assert table.ends() == {}
    pass_time(table, 0.01)
    assert table.recorders[ROUTE].failed[1].code == ErrorCode.ERROR_CODE_ABORTED


def test_rows_that_nobody_asks_for_are_dropped_after_a_while() -> None:
    table = Table({}, unclaimed_timeout_ms=10_000)
    first, second = come(table, 9, 0), come(table, 8, 6)
    pass_time(table, 9.99)
    assert len(table.registry.table) == 2
    pass_time(table, 0.01)
    assert len(table.registry.table) == 0
    assert [step.pending_ack.count for step in (*first, *second)] == [1, 1]
    assert table.aborted == [(0, 9), (0, 8)]
    assert table.registry.counts.unclaimed == 2


# How they end.


def test_ends_are_counted_by_their_name() -> None:
    table = Table({1: 0, 2: 0, 3: 0, 4: 0})
    table.route(batch([RowShape(4, 0, 1, FINISHED)]), 0)
    for key, code in ((1, ErrorCode.ERROR_CODE_GAP), (2, 98), (3, 99)):
        table.registry.fail(known(table, key), code, "x")  # type: ignore[arg-type]
    assert table.registry.counts.failed == {"gap": 1, "other": 2}
    assert (table.registry.counts.opened, table.registry.counts.finished) == (4, 1)


def test_who_holds_a_stream_back_gives_way() -> None:
    """Of the requests that hold a stream's oldest step, unclaimed ones are dropped."""
    table = Table({})
    step = table.route(batch([RowShape(9, 0, 1)]), 0)
    table.registry.evict(step.pending_ack, 0)
    assert table.registry.table.get(9) is None


def test_rows_that_only_steps_shows_open_claimed_requests() -> None:
    table = Table({})
    table.registry.default_route = UNROUTED
    step = table.route(batch([RowShape(9, 6, 1)]), 0)
    assert step.rows.request_ids.tolist() == [9]
    request = known(table, 9)
    assert (request.is_claimed, table.registry.table.route[request.slot]) == (True, UNROUTED)
    table.registry.on_worker_has(8, source(0))
    assert table.registry.table.get(8) is None
    table.registry.default_route = UNCLAIMED
    table.route(batch([RowShape(9, 7, 1, FINISHED)], step=2), 0)
    assert table.registry.table.get(9) is None
