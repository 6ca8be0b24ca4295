"""uvloop: applications that use it, and a whole system under it."""

import asyncio

import uvloop

from tests.support.waiting import soon
from tests.system.asking import all_exact, ask, wanted
from tests.system.deployment import Deployment
from tests.system.inprocess import trio
from tokenbus.client import RequestEnd, StepRows
from tokenbus.engines.synthetic import true_tokens


def test_application_may_run_under_uvloop(deployment: Deployment) -> None:
    """A processor, a publisher and a client of many tasks on uvloop: rows, tokens, columns, an abort, an end."""

    async def run() -> None:
        async with trio(deployment) as made:
            await all_exact(ask(made.client, 64, 40), 40)
            generation = made.client.generate(wanted(20, key=9))
            tokens = [token.id async for token in generation]
            assert tokens == true_tokens(generation.request_id, 0, 20).ids.tolist()
            async with made.client.generate(wanted(None)) as endless:
                await soon(anext(endless))
                made.client.abort(endless.request_id)
                assert [token async for token in endless]
            async with made.client.steps() as steps:
                made.client.submit(wanted(5, key=10))
                items = [await soon(anext(steps))]
                while not isinstance(items[-1], RequestEnd):
                    items.append(await soon(anext(steps)))
            ids = [id_ for item in items if isinstance(item, StepRows) for id_ in item.target.token_ids.tolist()]
            assert ids == true_tokens(10, 0, 5).ids.tolist()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
