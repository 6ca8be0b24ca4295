"""Buffers: rows that wait in this process, each for its own request."""

import asyncio
import gc
from weakref import ref

import numpy as np

from tests.services.builders import ids, step_of
from tests.support.waiting import soon, turns
from tokenbus.testing import RowShape, batch, row_shapes
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import ErrorCode, RequestError
from tokenbus_services.delivery import RequestTokens
from tokenbus_services.processor.buffers import RequestBuffers
from tokenbus_services.processor.requests import Deadline, Request, RequestTable, State
from tokenbus_services.processor.step_parts import StepParts


class Fixture:
    """Buffers of some requests, each open at the table."""

    def __init__(self, *keys: int, most: int = 3) -> None:
        self.table = RequestTable(100, 100)
        self.buffers = RequestBuffers(self.table, most)
        self.tokens = {key: self.open(key) for key in keys}

    def open(self, key: int) -> RequestTokens:
        return self.buffers.open(self.table.open(key, 0, 0, State.RUNNING, Deadline(1.0)))

    def request(self, key: int) -> Request:
        request = self.table.get(key)
        assert request is not None
        return request

    def give(self, *wanted: RowShape, places: list[int] | None = None) -> int:
        """Give a step's rows, or some, and return how many hold it then."""
        step = step_of(batch(wanted))
        is_mine = np.isin(np.arange(len(wanted)), range(len(wanted)) if places is None else places)
        *_, mine = StepParts(step.rows, is_mine.astype(np.int32))
        self.buffers.give(step, self.table.slots_of(step.rows.request_keys), mine)
        return step.pending_ack.count


def test_each_row_goes_to_its_own_request() -> None:
    """Rows go where their requests' rows wait, whatever the order of the columns, and each holds its step (case 3)."""
    made = Fixture(1, 2, 3)
    assert made.give(*row_shapes([3, 1, 2])) == 4
    for key, tokens in made.tokens.items():
        ((step, place),) = tokens.waiting
        assert step.rows.row(place).key == key


def test_some_of_a_steps_rows() -> None:
    made = Fixture(1, 2, 3)
    assert made.give(*row_shapes([3, 1, 2]), places=[2, 0]) == 3
    assert [len(made.tokens[key]) for key in (1, 2, 3)] == [0, 1, 1]
    ((step, place),) = made.tokens[2].waiting
    assert step.rows.row(place).key == 2


async def test_who_waits_is_woken_by_its_own_rows() -> None:
    made = Fixture(1, 2)
    waiting = asyncio.ensure_future(made.tokens[1].__anext__())
    await turns()
    made.give(RowShape(2))
    assert made.tokens[1]._waiter.is_waiting
    await turns()
    assert not waiting.done()
    made.give(RowShape(1))
    assert (await soon(waiting)).id == ids(1, 0, 1)[0]


def test_request_is_over_full_beyond_its_bound() -> None:
    """As many rows as may wait are not too many; one more is; and taking them makes room again."""
    made = Fixture(1, 2, most=3)
    for position in range(3):
        made.give(RowShape(1, position), RowShape(2, position))
    assert made.buffers.check(4) == []
    assert not made.buffers.is_over_full
    made.give(RowShape(1, 3))
    assert made.buffers.check(4) == [made.tokens[1]]
    assert made.buffers.is_over_full
    made.buffers.forget(made.tokens[1])
    assert made.buffers.check(4) == []
    assert not made.buffers.is_over_full


def test_slot_that_is_used_again_is_another_requests() -> None:
    """A new request in an old one's slot gets its own rows, and the old one's iterator none of them (case 3)."""
    made = Fixture(1)
    made.table.close(made.request(1), None)
    new = made.open(2)
    made.give(RowShape(2))
    assert (len(new), len(made.tokens[1])) == (1, 0)


def test_rows_of_a_request_that_ended_are_its_readers_alone() -> None:
    made = Fixture(1, 2)
    made.give(*row_shapes([1, 2]))
    made.buffers.finish(made.request(1), RowStatus.FINISHED_STOP)
    made.buffers.fail(made.request(2), RequestError(request_key=2, code=ErrorCode.ERROR_CODE_GAP))
    for key in (1, 2):
        tokens = made.tokens.pop(key)
        waiting = ref(tokens.waiting)
        made.table.close(made.request(key), None)
        del tokens
        gc.collect()
        assert waiting() is None
