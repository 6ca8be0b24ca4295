"""Whoever consumes tokens: it gets steps in batch order, ends by its deadline, and delays nobody else."""

import asyncio

from tests.support.waiting import soon, until
from tests.system.asking import Asked, all_exact, all_failed, ask, begun, wanted
from tests.system.audit import Audit
from tests.system.client_program import taken
from tests.system.deployment import Deployment, Overrides
from tokenbus.bus.link import SessionState
from tokenbus.client import Client
from tokenbus.processor import Processor
from tokenbus_contracts.generated.request_pb2 import ErrorCode

SHORT: Overrides = {"bus__heartbeat_timeout_ms": 3000, "worker__longest_step_ms": 1000}
LONG = 600_000  # tokens that no test waits for


async def test_steps_come_whole_and_in_batch_order(deployment: Deployment) -> None:
    """A worker publishes the rows of a step in two parts, with drafts, and not in the order of its batch.

    `Processor.steps` has each step in that order, with every row's own columns.
    """
    async with Processor(deployment.settings(processor__drain_timeout_ms=0)) as processor:
        worker = deployment.start_module("handing_worker")
        await asyncio.to_thread(worker.wait_for, '"connected"')
        async with Client(deployment.settings(client__drain_timeout_ms=0)) as client:
            steps = processor.steps()
            asked = ask(client, 8, 300)
            audits = {each.tokens.request_id: Audit(each.tokens.request_id) for each in asked}
            drafts = 0
            while not all(audit.position == 300 for audit in audits.values()):
                step = await soon(anext(steps))
                assert step.target.batch_indices.tolist() == list(range(step.target.row_count))
                for row in step.target.rows():
                    audits[row.request_id].take(row)
                if step.draft is not None:
                    drafts += 1
                    assert step.draft.request_ids.tolist() == step.target.request_ids.tolist()
            await steps.aclose()
            await all_exact(asked, 300)
        assert await asyncio.to_thread(worker.terminate) == 0
    assert all(audit.is_exact for audit in audits.values()), audits
    assert drafts > 0


async def test_client_that_stands_still_loses_its_own_requests_alone(deployment: Deployment) -> None:
    """A client that reads nothing has its requests ended when too much waits for it.

    The engine's steps, and the requests of another client that share them, go on all the while.
    """
    deployment.start_processor(clients__send_queue_bytes=2_097_152, **SHORT)
    deployment.start_worker()
    slow = deployment.start_module("client_program", str(LONG), "16", **SHORT)
    async with Client(deployment.settings()) as client:
        await until(lambda: len(taken(slow.lines("token "))) == 16)  # each request has begun
        slow.stop()
        await all_exact(ask(client, 4, 1800, top_logprobs=0), 1800)
        slow.go_on()
        await asyncio.to_thread(slow.wait_for, "slow_client", 16)
    places = taken(slow.lines("token "))
    for line in slow.lines("failed "):
        _, request_id, emitted, _ = line.split()
        assert int(emitted) > places[int(request_id)].position, "the error counts what was dropped too"


async def test_requests_end_by_their_deadlines_whatever_stands_still(deployment: Deployment) -> None:
    """A processor stands still for longer than its peers may be silent, and then their worker does.

    Requests whose deadline passes meanwhile end then, with an error that counts their tokens. The processor's others go
    on where they were, since the silence was its own; those of the silent worker go on once a worker is there again.
    """
    processor = deployment.start_processor(**SHORT)
    worker = deployment.start_worker(**SHORT)
    async with Client(deployment.settings(**SHORT)) as client:
        generate = wanted(None)
        generate.deadline_ms = 4000
        staying = ask(client, 4, 1500)
        await begun(staying)
        doomed = [Asked(client.generate(generate)) for _ in range(4)]
        await until(lambda: all(each.audit.position or each.task.done() for each in doomed))
        processor.stop()
        await all_failed(doomed, ErrorCode.ERROR_CODE_DEADLINE)
        await until(lambda: client.sessions[0].state is SessionState.GREETING)
        processor.go_on()
        await all_exact(staying, 1500)
        assert not processor.lines('"worker gone"')
        lost = ask(client, 4, 600)
        await begun(lost)
        worker.stop()
        await asyncio.to_thread(processor.wait_for, '"worker gone"')
        worker.go_on()
        await all_exact(lost, 600)
        assert all(len(each.tokens.turns) == 2 for each in lost)
