"""StepQueue: steps on their way to the consumer that iterates over all of them."""

import asyncio

from tests.services.builders import batch, rows, step_of
from tests.support.waiting import soon, turns
from tokenbus_services.delivery import Step
from tokenbus_services.processor.buffers import StepQueue


def steps(count: int) -> list[Step]:
    return [step_of(batch(rows([1], position=number), step=number)) for number in range(1, count + 1)]


def counts(made: list[Step]) -> list[int]:
    """Return how many hold each step beside its maker."""
    return [step.pending_ack.count - 1 for step in made]


async def test_steps_come_in_order_and_are_held_until_the_next_is_asked_for() -> None:
    queue, made = StepQueue(4), steps(2)
    for step in made:
        queue.put(step)
    assert counts(made) == [1, 1]
    assert await queue.get() is made[0]
    assert counts(made) == [1, 1]
    assert await queue.get() is made[1]
    assert counts(made) == [0, 1]
    queue.close()
    assert await queue.get() is None
    assert counts(made) == [0, 0]


async def test_queue_is_full_with_exactly_as_many_as_it_may_have() -> None:
    """One step less than the bound leaves room; at the bound there is none; taking one makes room again (case 20)."""
    queue, made = StepQueue(2), steps(2)
    queue.put(made[0])
    assert not queue.is_full
    queue.put(made[1])
    assert queue.is_full
    await queue.get()
    assert not queue.is_full
    assert (len(queue), queue.peak) == (1, 2)


async def test_consumer_waits_for_the_next_step_and_for_the_end() -> None:
    queue, made = StepQueue(2), steps(1)
    waiting = asyncio.ensure_future(queue.get())
    await turns()
    queue.put(made[0])
    assert await soon(waiting) is made[0]
    waiting = asyncio.ensure_future(queue.get())
    await turns()
    assert counts(made) == [0]
    queue.close()
    assert await soon(waiting) is None


async def test_what_waits_when_the_queue_closes_can_be_taken() -> None:
    queue, made = StepQueue(2), steps(1)
    queue.put(made[0])
    queue.close()
    assert await queue.get() is made[0]
    assert await queue.get() is None


async def test_discarding_lets_everything_go() -> None:
    """A consumer that leaves holds nothing back: neither what it took last nor what it did not take."""
    queue, made = StepQueue(4), steps(3)
    for step in made:
        queue.put(step)
    await queue.get()
    queue.discard()
    assert counts(made) == [0, 0, 0]
    assert len(queue) == 0
    queue.discard()
    assert counts(made) == [0, 0, 0]
