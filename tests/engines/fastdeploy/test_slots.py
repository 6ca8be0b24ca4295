"""SlotRegistry: one request of a slot is told from the next, and none is left open."""

from typing import Any

import numpy as np
import pytest

from tests.engines.fastdeploy.engine import message
from tokenbus.engines.fastdeploy.environment import Options
from tokenbus.engines.fastdeploy.message import Kind, Lengths
from tokenbus.engines.fastdeploy.slots import REPLACED, SlotRegistry
from tokenbus.engines.fastdeploy.step_arrays import arrays_of
from tokenbus.testing import ManualClock
from tokenbus.worker import StepArrays
from tokenbus_contracts import ContractError, RowStatus

ACTIVE, IDLE, PREFILLING = RowStatus.ACTIVE, RowStatus.IDLE, RowStatus.PREFILLING
PREEMPTED, FINISHED = RowStatus.PREEMPTED, RowStatus.FINISHED_STOP
HOUR = 3600.0


class Told:
    """What a book of slots says of one message after the other, all of which are published."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.registry = SlotRegistry(self.clock.now)
        self.open: dict[int, int] = {}
        """By key, the place that a request's next token has, as a processor counts."""

    def step(
        self, *counts: int, computed: tuple[int, ...] = (), prompt: int = 4, is_running: bool = True
    ) -> StepArrays:
        lengths = Lengths(np.array(computed), np.full(len(computed), prompt)) if computed else None
        given = message(3, *counts, is_running=is_running, kind=Kind.SPECULATED, lengths=lengths)
        arrays, _ = arrays_of(given, Options())
        self.registry.fill(arrays, given)
        self._follow(arrays)
        return arrays

    def _follow(self, rows: StepArrays) -> None:
        """Assert that no token's place is missing or there twice, and that no row is about a request that has ended."""
        keys = rows.request_ids.tolist()
        assert len(set(keys)) == len(keys)
        for row, key in enumerate(keys):
            expected = self.open.setdefault(key, 0)
            assert rows.positions[row] == expected
            self.open[key] += int(rows.token_counts[row])
            if statuses(rows)[row] in (FINISHED, REPLACED, RowStatus.UNRECOVERABLE):
                del self.open[key]


def statuses(rows: StepArrays) -> list[RowStatus]:
    return [RowStatus(status) for status in np.asarray(rows.statuses).tolist()]


OVER = RowStatus.UNRECOVERABLE
GOES_ON = ((1, 1), (), [ACTIVE] * 2)
LIVES: dict[str, tuple[list[tuple[Any, ...]], list[int]]] = {
    "a length that grows is one request's": ([((1,), (4,), [ACTIVE]), ((3,), (7,), [ACTIVE])], [4]),
    "a prompt in chunks has no tokens": ([((0,), (2,), [PREFILLING]), ((1,), (4,), [ACTIVE])], [1]),
    "another prompt ends the former request": ([((2, 2), (6, 6), [ACTIVE] * 2), ((0, 1), (2, 7), [FINISHED, ACTIVE]), ((1, 1), (4, 8), [ACTIVE] * 2)], [1, 4]),  # noqa: E501
    "a shorter length is another request's": ([((2,), (6,), [ACTIVE]), ((1,), (4,), [ACTIVE, REPLACED])], [1]),
    "the same length too": ([((2,), (6,), [ACTIVE]), ((1,), (6,), [ACTIVE, REPLACED])], [1]),
    "another prompt's length too": ([((2,), (6,), [ACTIVE]), ((1,), (9,), [ACTIVE, REPLACED], 5)], [1]),
    "an op without lengths has a token for each request in each step": ([GOES_ON, ((0, 1), (), [FINISHED, ACTIVE]), ((0, 1), (), [IDLE, ACTIVE]), GOES_ON], [1, 4]),  # noqa: E501
    "a step without a token in the middle is no end": ([((2,), (6,), [ACTIVE]), ((0,), (6,), [IDLE]), ((1,), (7,), [ACTIVE])], [3]),  # noqa: E501
    "a preempted request is resumed in any slot, as another": (
        [
            ((2, 1), (6, 6), [ACTIVE] * 2),
            ((-9, 1), (6, 7), [PREEMPTED, ACTIVE]),
            ((0, 1), (0, 8), [FINISHED, ACTIVE]),
            ((1, 1), (6, 9), [ACTIVE] * 2),
        ],
        [1, 4],
    ),
    "a slot with tokens right after its request was preempted": ([((2,), (), [ACTIVE]), ((-9,), (), [PREEMPTED]), ((1,), (), [ACTIVE, REPLACED])], [1]),  # noqa: E501
    "a request that cannot be recovered is over": ([((-3,), (), [OVER]), ((1,), (), [ACTIVE])], [1]),
}  # fmt: skip
"""Steps: tokens of slots, their lengths, the rows' statuses, and a prompt's length that differs; then what is open."""


@pytest.mark.parametrize(("steps", "left"), LIVES.values(), ids=LIVES)
def test_one_request_of_a_slot_is_told_from_the_next(steps: list[tuple[Any, ...]], left: list[int]) -> None:
    """Each row is its request's next, and each request has one last row (case 9, 22)."""
    told = Told()
    for counts, computed, expected, *prompt in steps:
        assert statuses(told.step(*counts, computed=computed, prompt=prompt[0] if prompt else 4)) == expected
    assert sorted(told.open.values()) == left


def test_nothing_left_to_do_ends_every_request() -> None:
    told = Told()
    told.step(1, 1, 0)
    assert statuses(told.step(1, 0, -9, is_running=False)) == [FINISHED, FINISHED, PREEMPTED]
    assert statuses(told.step(1, 0, 0)) == [ACTIVE, IDLE, IDLE]
    assert statuses(told.step(is_running=False)) == []


def test_life_does_not_last_longer_than_a_request_may() -> None:
    told = Told()
    told.step(1, 0)
    told.clock.advance(11 * HOUR)
    assert statuses(told.step(1, 0)) == [ACTIVE, IDLE]
    told.clock.advance(2 * HOUR)
    assert statuses(told.step(1, 0)) == [ACTIVE, IDLE, REPLACED, REPLACED]
    assert sorted(told.open.values()) == [0, 1]

    told.clock.advance(30 * HOUR)  # its processor has ended what was silent for a day
    told.open.clear()
    assert statuses(told.step(1, 0)) == [ACTIVE, IDLE]
    assert sorted(told.open.values()) == [0, 1]


def test_step_that_is_refused_never_was() -> None:
    told = Told()
    told.step(2)
    with pytest.raises(ValueError, match="broadcast"):
        told.step(3, computed=(9, 9))
    told.step(1)
    assert list(told.open.values()) == [3]


@pytest.mark.parametrize("lost", [[0, 1, 2], [1]])
def test_requests_whose_steps_were_lost_end_with_an_error(lost: list[int]) -> None:
    told = Told()
    before = told.step(1, 1, 0).request_ids.tolist()
    told.registry.lose(None if len(lost) == 3 else [before[slot] for slot in (*lost,)] + [7])
    rows = told.step(2, 1, 1)
    assert statuses(rows)[3:] == [OVER] * len(lost)
    assert rows.request_ids[3:].tolist() == [before[slot] for slot in lost]
    assert [key in before for key in rows.request_ids[:3].tolist()] == [slot not in lost for slot in range(3)]


def test_engine_that_says_which_request_a_slot_has() -> None:
    told = Told()
    told.registry.assign(1, 77)
    told.step(1, 1)
    assert statuses(told.step(0, 0)) == [FINISHED, IDLE]
    rows = told.step(0, 2)
    assert rows.request_ids[1] == 77
    told.registry.assign(1, 78)
    rows = told.step(0, 1)
    assert statuses(rows) == [IDLE, ACTIVE, REPLACED]
    assert rows.request_ids[1:].tolist() == [78, 77]
    assert told.open[78] == 1


def test_assigned_request_is_resumed_in_another_slot() -> None:
    """A request that was preempted goes on at the place where it was, in whichever slot it is put (case 22)."""
    told = Told()
    told.registry.assign(0, 77)
    told.step(3, 1)
    assert statuses(told.step(-9, 1)) == [PREEMPTED, ACTIVE]
    told.registry.assign(0, 78)
    told.step(1, 1)
    told.registry.assign(1, 77)
    rows = told.step(1, 2)
    assert rows.request_ids[1] == 77
    assert rows.positions[1] == 3
    assert told.open[77] == 5


def test_assigned_request_moves_until_it_ends() -> None:
    told = Told()
    told.registry.assign(0, 77)
    told.step(2, 0)
    told.registry.assign(1, 77)
    rows = told.step(1, 1)
    assert (rows.request_ids[1], told.open[77]) == (77, 3)
    told.step(0, -3)
    with pytest.raises(ContractError, match=r"^request_id: a slot whose request has not ended, got 77$"):
        told.registry.assign(1, 77)
