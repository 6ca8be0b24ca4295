"""Workers and clients that are killed at once, while their requests run."""

import asyncio

from tests.support.waiting import until
from tests.system.asking import Asked, all_exact, all_failed, ask, begun
from tests.system.audit import Audit
from tests.system.deployment import Deployment
from tests.system.test_stopped import LONG, SHORT, last_positions
from tokenbus.client import Client
from tokenbus_contracts.generated.request_pb2 import ErrorCode


async def test_killed_workers_requests_end_with_an_error_that_counts(deployment: Deployment) -> None:
    """A killed worker's requests end with an error that counts the tokens that their clients got."""
    deployment.start_processor(**SHORT)
    worker = deployment.start_worker(**SHORT)
    async with Client(deployment.settings(**SHORT)) as client:
        asked = ask(client, 16, LONG)
        await begun(asked)
        worker.kill()
        await all_failed(asked, ErrorCode.ERROR_CODE_WORKER_LOST)


async def test_requests_of_a_killed_client_are_resumed_from_what_it_took(deployment: Deployment) -> None:
    """Another client goes on from the positions that a killed one had taken, and misses nothing."""
    deployment.start_processor()
    deployment.start_worker()
    first = deployment.start_module("client_program", "3000", "8")
    await asyncio.to_thread(first.wait_for, "token", 400)
    first.kill()
    taken = last_positions(first.lines("token "))
    assert len(taken) == 8
    async with Client(deployment.settings()) as client:
        resumed = [Asked(client.resume(key, position), position) for key, position in taken.items()]
        await all_exact(resumed, 3000)


async def test_request_that_was_sent_anew_is_resumed(deployment: Deployment) -> None:
    """Its processor is killed before any worker has it, so that the next life gets it under another key."""
    processor = deployment.start_processor()
    first = deployment.start_module("client_program", "3000", "1")
    async with Client(deployment.settings(client__name="observer")) as observer:

        async def has_it() -> bool:
            return (await observer.status()).open_requests == 1

        await until(has_it)
        processor.kill()
    deployment.start_processor()
    deployment.start_worker()
    await asyncio.to_thread(first.wait_for, "token", 50)
    first.kill()
    ((key, position),) = last_positions(first.lines("token ")).items()
    request_id = int(first.lines("asked ")[0].split()[1])
    audit = Audit(request_id, position)
    async with Client(deployment.settings()) as client:
        async for row in client.resume(key, position).rows():
            audit.take(row)
    assert key != request_id
    assert audit.is_exact
    assert audit.position == 3000
