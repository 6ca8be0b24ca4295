"""What an engine meets while its processor is away: it waits, sheds, or gets an error; in a thread and in asyncio."""

import asyncio
from collections.abc import Callable, Sequence

from tests.support.waiting import soon, until
from tests.system.asking import all_exact, resumed
from tests.system.audit import Audit
from tests.system.deployment import Deployment, Overrides
from tests.system.hand_made import MadeRow, step
from tokenbus.client import Client
from tokenbus.processor import Processor
from tokenbus.worker import Publisher
from tokenbus_contracts import LogprobBatch, RowStatus, Scoring

STEPS = 40
MANY = tuple(range(1, 9))
SMALL: Overrides = {"worker__retention_items": 16}


def batches(steps: int = STEPS, top_k: int = 2, keys: Sequence[int] = (1, 2)) -> list[LogprobBatch]:
    """Return the steps of some requests, three tokens each, to their ends."""
    return [
        step(
            number + 1,
            [MadeRow(key, 3 * number, 3, _status(number, steps), top_k=top_k) for key in keys],
        )
        for number in range(steps)
    ]


def _status(number: int, steps: int) -> RowStatus:
    return RowStatus.FINISHED_LENGTH if number == steps - 1 else RowStatus.ACTIVE


async def _given(client: Client, processor: Processor) -> None:
    """Fail unless both requests get all of their tokens."""
    await all_exact(await resumed(client, processor, (1, 2)), 3 * STEPS)


def _publish_all(publisher: Publisher, on_each: Callable[[], None] = lambda: None) -> None:
    for batch in batches():
        publisher.publish(batch)
        on_each()


async def test_engine_thread_waits_while_the_processor_is_away(deployment: Deployment) -> None:
    """Under `block` publishing waits once retention is full, goes on when a processor comes, and nothing is lost."""
    published: list[None] = []
    with Publisher(deployment.settings(**SMALL)) as publisher:
        engine = asyncio.create_task(asyncio.to_thread(_publish_all, publisher, lambda: published.append(None)))
        await until(lambda: publisher.blocked)
        assert len(published) == 15, "the last place is for what finds no room"
        async with (
            Processor(deployment.settings()) as processor,
            Client(deployment.settings(client__drain_timeout_ms=0)) as client,
        ):
            await _given(client, processor)
            await soon(engine)
            await until(lambda: not publisher.retention)


async def test_event_loop_goes_on_while_publishing_waits(deployment: Deployment) -> None:
    """`published` waits without stopping the event loop it runs on, where the processor that makes room may live."""
    async with Publisher(deployment.settings(**SMALL)) as publisher:
        made = batches()

        async def engine() -> None:
            """Publish all, on the loop that the publisher runs on."""
            for batch in made:
                await publisher.published(batch)

        running = asyncio.create_task(engine())
        await until(lambda: publisher.blocked)
        async with (
            Processor(deployment.settings()) as processor,
            Client(deployment.settings(client__drain_timeout_ms=0)) as client,
        ):
            await _given(client, processor)
            await soon(running)
            await until(lambda: not publisher.retention)


async def test_steps_that_pause_in_the_middle_of_one_lose_nothing(deployment: Deployment) -> None:
    """While a slow iterator over steps makes its worker wait, the time for the rest of a step does not run out.

    A step has more parts than the worker has credit, so that nearly every pause is in the middle of one.
    """
    credit = {"processor__credit_items": 4, "processor__step_timeout_ms": 1500}
    async with (
        Processor(deployment.settings(processor__step_queue=1, **credit)) as processor,
        Publisher(deployment.settings()) as publisher,
    ):
        steps = processor.steps()
        engine = asyncio.create_task(asyncio.to_thread(_publish_in_parts, publisher))
        await until(
            lambda: processor.workers.by_id and processor.intake.is_throttled(processor.workers.by_id["worker-0"])
        )
        (worker,) = processor.workers.by_id.values()
        waits_until = processor.clock.now() + 3.0
        await until(lambda: processor.clock.now() > waits_until)
        assert worker.stream.expected < publisher.retention.next_sequence
        audits = {key: Audit(key) for key in MANY}
        for _ in range(STEPS):
            for row in (await soon(anext(steps))).target.rows():
                audits[row.key].take(row)
        await steps.aclose()
        assert all(audit.is_exact and audit.position == 3 * STEPS for audit in audits.values()), audits
        await soon(engine)


def _publish_in_parts(publisher: Publisher) -> None:
    for batch in batches(keys=MANY):
        for place in range(len(MANY)):
            header = batch.header._replace(part_index=place, part_count=len(MANY))
            publisher.publish(LogprobBatch.of_views(header, batch.select([place]).columns))


async def test_shed_rows_have_no_alternatives_but_every_token(deployment: Deployment) -> None:
    """Under `shed` rows lose their alternatives while retention is nearly full, say so, and never lose a token."""
    settings = deployment.settings(
        worker__policy="shed", worker__shed_at=0.5, worker__retention_items=2 * STEPS, worker__id="shedding"
    )
    steps = STEPS + 20
    with Publisher(settings) as publisher:
        for batch in batches(steps):
            publisher.publish(batch)
        assert publisher.shed == 20
        async with (
            Processor(deployment.settings()) as processor,
            Client(deployment.settings(client__drain_timeout_ms=0)) as client,
        ):
            await until(lambda: all(map(processor.registry.table.knows, (1, 2))))
            rows = [row async for row in client.resume(1, 0).rows()]
            tokens = [token async for token in client.resume(2, 0)]
            await until(lambda: not publisher.retention)
    assert [row.position for row in rows] == list(range(0, 3 * steps, 3))
    assert [row.scoring for row in rows] == [Scoring.FULL] * STEPS + [Scoring.SHED] * 20
    assert [len(token.alternatives) for token in tokens] == [2] * 3 * STEPS + [0] * 60
    assert [token.is_shed for token in tokens] == [False] * 3 * STEPS + [True] * 60
    assert all(token.logprob is not None for token in tokens)
