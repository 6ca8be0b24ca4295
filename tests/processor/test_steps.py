"""Processor.steps: every step, whole, held for its one consumer, and no more than that takes."""

import asyncio

import pytest

from tests.processor.live import running
from tests.support.waiting import soon, turns
from tokenbus.delivery import Step
from tokenbus.processor import Processor
from tokenbus.testing import RowShape, row_shapes
from tokenbus_contracts import RowStatus

FINISHED = RowStatus.FINISHED_LENGTH


async def test_no_step_is_missed_before_the_first_is_asked_for() -> None:
    async with running() as made:
        steps = made.processor.steps()
        await made.worker.publish(row_shapes([1]))
        await made.worker.publish(row_shapes([1], position=1))
        await turns()
        with pytest.raises(RuntimeError, match="already being iterated over"):
            made.processor.steps()
        assert [(await soon(anext(steps))).number for _ in range(2)] == [1, 2]
        await steps.aclose()


async def test_step_is_acknowledged_when_the_next_is_asked_for() -> None:
    """A step that was yielded is still its consumer's; asking for the next one says that it is done (case 21)."""
    async with running() as made:
        steps = made.processor.steps()
        first = asyncio.ensure_future(anext(steps))
        await turns()
        await made.worker.publish(row_shapes([1]))
        await soon(first)
        acks = made.processor.workers.by_id["worker-0"].stream.acks
        await made.pass_time(0.2)
        assert acks.acknowledged == 0
        second = asyncio.ensure_future(anext(steps))
        await turns()
        await made.pass_time(0.2)
        assert acks.acknowledged == 1
        assert (await made.worker.heard("ack")).ack.through_sequence == 1
        second.cancel()
        await turns()


async def test_steps_that_are_not_taken_slow_their_workers() -> None:
    """While as many steps wait as may, a worker gets no more credit, and gets it when they are taken (case 20)."""
    async with running(step_queue=2, credit_items=4) as made:
        steps = made.processor.steps()
        first = asyncio.ensure_future(anext(steps))
        await turns()
        stream = made.processor.workers.by_id["worker-0"].stream
        for position in range(5):
            if made.worker.sequence < stream.credit.through_sequence:
                await made.worker.publish(row_shapes([1], position=position))
        granted = stream.credit.through_sequence
        await made.pass_time(1.0)
        assert stream.credit.through_sequence == granted
        await soon(first)
        for _ in range(3):
            await soon(anext(steps))
        await made.pass_time(0.2)
        assert stream.credit.through_sequence > granted
        await steps.aclose()


async def test_who_leaves_the_iteration_holds_nothing_back() -> None:
    async with running() as made:
        steps = made.processor.steps()
        first = asyncio.ensure_future(anext(steps))
        await turns()
        for position in range(3):
            await made.worker.publish(row_shapes([1], position=position))
        await soon(first)
        await steps.aclose()
        await made.pass_time(0.2)
        assert made.processor.workers.by_id["worker-0"].stream.acks.acknowledged == 3
        await made.worker.publish([RowShape(9, 0, 1, FINISHED)])
        assert made.processor.registry.table.buffered_rows == 1


async def test_steps_end_when_the_processor_closes() -> None:
    found: list[Step] = []

    async def consume(processor: Processor) -> None:
        async for step in processor.steps():
            found.append(step)  # noqa: PERF401 - one after the other

    async with running() as made:
        consuming = asyncio.create_task(consume(made.processor))
        await turns()
        await made.worker.publish(row_shapes([1]))
    await soon(consuming)
    assert len(found) == 1
