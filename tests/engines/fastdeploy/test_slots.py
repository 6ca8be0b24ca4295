"""SlotRegistry: one request of a slot is told from the next, and none is left open."""

import numpy as np
import pytest

from tests.support.clock import ManualClock
from tokenbus_contracts import ContractError, RowStatus
from tokenbus_engines.fastdeploy.environment import Options
from tokenbus_engines.fastdeploy.message import Kind, Lengths, Message
from tokenbus_engines.fastdeploy.slots import REPLACED, SlotRegistry
from tokenbus_engines.fastdeploy.step_arrays import arrays_of
from tokenbus_services.worker import StepArrays

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
        message = self.message(*counts, computed=computed, prompt=prompt, is_running=is_running)
        arrays, _ = arrays_of(message, Options())
        self.registry.fill(arrays, message)
        self._follow(arrays)
        return arrays

    @staticmethod
    def message(*counts: int, computed: tuple[int, ...] = (), prompt: int = 4, is_running: bool = True) -> Message:
        return Message(
            kind=Kind.SPECULATED,
            stop_flag=1 if is_running else -1,
            flag=3,
            counts=np.array(counts, np.int32),
            tokens=np.arange(sum(max(count, 0) for count in counts), dtype=np.int32).reshape(-1, 1),
            lengths=Lengths(np.array(computed), np.full(len(computed), prompt)) if computed else None,
        )

    def _follow(self, rows: StepArrays) -> None:
        """Assert that no token's place is missing or there twice, and that no row is about a request that has ended."""
        keys = rows.request_keys.tolist()
        assert len(set(keys)) == len(keys)
        for row, key in enumerate(keys):
            expected = self.open.setdefault(key, 0)
            assert rows.positions[row] == expected
            self.open[key] += int(rows.token_counts[row])
            if statuses(rows)[row] in (FINISHED, REPLACED, RowStatus.UNRECOVERABLE):
                del self.open[key]


def statuses(rows: StepArrays) -> list[RowStatus]:
    return [RowStatus(status) for status in np.asarray(rows.statuses).tolist()]


def test_request_goes_on_while_its_slot_has_tokens() -> None:
    told = Told()
    rows = [told.step(*counts, computed=computed) for counts, computed in (((1,), (4,)), ((3,), (7,)), ((2,), (9,)))]
    assert len({int(row.request_keys[0]) for row in rows}) == 1
    assert [int(row.positions[0]) for row in rows] == [0, 1, 4]
    assert list(told.open.values()) == [6]


def test_prompt_that_is_computed_in_chunks_has_no_tokens() -> None:
    """A slot below its prompt's length is prefilling, and its first token belongs to the same request (case 9)."""
    told = Told()
    rows = [told.step(0, computed=(2,)), told.step(0, computed=(3,)), told.step(1, computed=(4,))]
    assert [statuses(row) for row in rows] == [[PREFILLING], [PREFILLING], [ACTIVE]]
    assert len(told.open) == 1


def test_request_ends_when_its_slot_begins_another_prompt() -> None:
    told = Told()
    first = told.step(2, 2, computed=(6, 6))
    second = told.step(0, 1, computed=(2, 7))
    third = told.step(1, 1, computed=(4, 8))
    assert statuses(second) == [FINISHED, ACTIVE]
    assert second.request_keys.tolist() == first.request_keys.tolist()
    assert third.request_keys[0] != first.request_keys[0]
    assert third.request_keys[1] == first.request_keys[1]
    assert sorted(told.open.values()) == [1, 4]


@pytest.mark.parametrize(("computed", "prompt"), [((4,), 4), ((9,), 5), ((6,), 4)])
def test_request_that_takes_a_slot_without_a_step_between(computed: tuple[int, ...], prompt: int) -> None:
    told = Told()
    before = told.step(2, computed=(6,))
    rows = told.step(1, computed=computed, prompt=prompt)
    assert statuses(rows) == [ACTIVE, REPLACED]
    assert rows.request_keys[1] == before.request_keys[0]
    assert (rows.token_counts.tolist(), list(told.open.values())) == ([1, 0], [1])


def test_slot_without_lengths_ends_its_request_where_it_has_no_token() -> None:
    """An op that tells no lengths has a token for each request in each step, so a step without one is an end."""
    told = Told()
    told.step(1, 1)
    assert statuses(told.step(0, 1)) == [FINISHED, ACTIVE]
    assert statuses(told.step(0, 1)) == [IDLE, ACTIVE]
    assert statuses(told.step(1, 1)) == [ACTIVE, ACTIVE]
    assert sorted(told.open.values()) == [1, 4]


def test_step_without_a_token_in_the_middle_is_no_end() -> None:
    told = Told()
    told.step(2, computed=(6,))
    assert statuses(told.step(0, computed=(6,))) == [IDLE]
    told.step(1, computed=(7,))
    assert list(told.open.values()) == [3]


def test_request_that_was_preempted_is_resumed_as_another() -> None:
    """That engine resumes a request in any slot, with its tokens as a prompt: the rest is another life (case 22)."""
    told = Told()
    told.step(2, 1, computed=(6, 6))
    assert statuses(told.step(-9, 1, computed=(6, 7))) == [PREEMPTED, ACTIVE]
    assert statuses(told.step(0, 1, computed=(0, 8))) == [FINISHED, ACTIVE]
    told.step(1, 1, computed=(6, 9))
    assert sorted(told.open.values()) == [1, 4]


def test_slot_that_has_tokens_right_after_its_request_was_preempted() -> None:
    told = Told()
    told.step(2)
    told.step(-9)
    assert statuses(told.step(1)) == [ACTIVE, REPLACED]
    assert list(told.open.values()) == [1]


def test_request_that_cannot_be_recovered_is_over() -> None:
    told = Told()
    told.step(1)
    assert statuses(told.step(-3)) == [RowStatus.UNRECOVERABLE]
    assert statuses(told.step(1)) == [ACTIVE]
    assert list(told.open.values()) == [1]


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


def test_processor_ends_what_was_silent_for_a_day() -> None:
    told = Told()
    told.step(1, 0)
    told.clock.advance(30 * HOUR)
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


def test_lives_whose_steps_were_lost_end_with_an_error() -> None:
    told = Told()
    before = told.step(1, 1, 0).request_keys.tolist()
    told.registry.lose()
    rows = told.step(2, 0, 1)
    assert statuses(rows)[3:] == [RowStatus.UNRECOVERABLE] * 3
    assert rows.request_keys[3:].tolist() == before
    assert not set(rows.request_keys[:3].tolist()) & set(before)
    assert statuses(told.step(1, 1, 1)) == [ACTIVE] * 3
    assert sorted(told.open.values()) == [1, 2, 3]


def test_lives_that_the_bus_has_ended_need_no_row() -> None:
    told = Told()
    before = told.step(1, 1).request_keys.tolist()
    told.registry.lose()
    told.registry.forget(before[:1])
    told.open.pop(before[0])
    assert told.step(1, 1).request_keys[2:].tolist() == before[1:]


def test_engine_that_says_which_request_a_slot_has() -> None:
    told = Told()
    told.registry.assign(1, 77)
    told.step(1, 1)
    assert statuses(told.step(0, 0)) == [FINISHED, IDLE]
    rows = told.step(0, 2)
    assert rows.request_keys[1] == 77
    told.registry.assign(1, 78)
    rows = told.step(0, 1)
    assert statuses(rows) == [IDLE, ACTIVE, REPLACED]
    assert rows.request_keys[1:].tolist() == [78, 77]
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
    assert rows.request_keys[1] == 77
    assert rows.positions[1] == 3
    assert told.open[77] == 5


def test_assigned_request_that_moves_without_being_preempted() -> None:
    told = Told()
    told.registry.assign(0, 77)
    told.step(2, 0)
    told.registry.assign(1, 77)
    rows = told.step(1, 1)
    assert rows.request_keys[1] == 77
    assert told.open[77] == 3


def test_key_of_a_request_that_ended_is_not_taken_again() -> None:
    told = Told()
    told.registry.assign(0, 77)
    told.step(-3)
    with pytest.raises(ContractError) as refused:
        told.registry.assign(0, 77)
    assert str(refused.value) == "request_key: one whose request has not ended, got 77"
