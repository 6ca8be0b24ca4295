"""Workers that are stopped while requests come."""

import asyncio
import os
import signal
from functools import partial

from tests.support.waiting import until
from tests.system.asking import all_exact, ask, begun
from tests.system.deployment import Deployment
from tokenbus.client import Client
from tokenbus.processor import Processor
from tokenbus_contracts import RowStatus

LONG = 600_000  # tokens that no test waits for


async def test_worker_that_leaves_gets_nothing_new_and_goes_when_it_is_done(deployment: Deployment) -> None:
    """While a worker still has requests after SIGTERM, new ones go to the other; with its last one it is gone."""
    # A worker that drains computes as fast as it can, and this client checks every token.
    patient = deployment.settings(
        processor__drain_timeout_ms=0, processor__abort_timeout_ms=60_000, clients__send_queue_frames=1_048_576
    )
    async with Processor(patient) as processor:
        start = partial(deployment.start_worker, worker__drain_timeout_ms=60_000)
        leaving, _ = [await asyncio.to_thread(start, name) for name in ("one", "two")]
        async with Client(deployment.settings()) as client:
            before = ask(client, 2, LONG)
            await begun(before)
            os.kill(leaving.pid, signal.SIGTERM)
            await until(lambda: processor.workers.by_id["one"].takes_no_more)
            await all_exact(ask(client, 16, 30), 30)
            assert "one" in processor.workers.by_id, "it has a request still"
            for each in before:
                client.abort(each.tokens.request_id)
            assert [(await each.ended(), each.tokens.status)[1] for each in before] == [RowStatus.ABORTED] * 2
            assert await asyncio.to_thread(leaving.wait) == 0
