"""Workers and clients that are killed at once, while their requests run."""

import asyncio

import pytest

from tests.integration.asking import Asked, all_exact, all_failed, ask, begun
from tests.integration.audit import Audit
from tests.integration.deployment import Deployment
from tests.integration.test_stopped import LONG, SHORT, last_positions
from tests.support.waiting import until
from tokenbus_contracts.generated.request_pb2 import ErrorCode
from tokenbus_services.client import Client


@pytest.mark.usefixtures("bus")
async def test_killed_workers_requests_end_with_an_error_that_counts(deployment: Deployment) -> None:
    """A killed worker's requests end with an error that counts the tokens that their clients got."""
    deployment.start_processor(**SHORT)
    worker = deployment.start_worker(**SHORT)
    async with Client(deployment.settings(**SHORT)) as client:
        asked = ask(client, 16, LONG)
        await begun(asked)
        worker.kill()
        await all_failed(asked, ErrorCode.ERROR_CODE_WORKER_LOST)


@pytest.mark.usefixtures("bus")
async def test_new_life_of_a_killed_worker_serves_at_once(deployment: Deployment) -> None:
    """A new process under a killed one's id is taken without waiting for the heartbeat's timeout to pass."""
    deployment.start_processor()
    worker = deployment.start_worker()
    async with Client(deployment.settings()) as client:
        asked = ask(client, 4, LONG)
        await begun(asked)
        worker.kill()
        again = deployment.start_worker()
        assert not again.lines('"refused by processor"')
        await all_failed(asked, ErrorCode.ERROR_CODE_WORKER_LOST)
        await all_exact(ask(client, 4, 300), 300)


async def test_other_workers_requests_are_unaffected(deployment: Deployment) -> None:
    """Of two workers one is killed; the requests of the other get every token."""
    deployment.start_processor(**SHORT)
    doomed = deployment.start_worker("doomed", "--model", "a", **SHORT)
    deployment.start_worker("other", "--model", "b", **SHORT)
    async with Client(deployment.settings(**SHORT)) as client:
        lost, safe = ask(client, 8, LONG, "a"), ask(client, 8, 1800, "b")
        await begun([*lost, *safe])
        doomed.kill()
        await all_failed(lost, ErrorCode.ERROR_CODE_WORKER_LOST)
        await all_exact(safe, 1800)


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
            """Tell whether the processor has the request."""
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


async def test_request_cannot_be_resumed_from_before_what_was_confirmed(deployment: Deployment) -> None:
    """A client that resumes before what was acked long ago gets an error with the lost tokens, none out of order."""
    deployment.start_processor()
    deployment.start_worker()
    first = deployment.start_module("client_program", "30000", "1")
    await asyncio.to_thread(first.wait_for, "token", 200)
    first.kill()
    ((key, position),) = last_positions(first.lines("token ")).items()
    async with Client(deployment.settings()) as client:
        audit = await Asked(client.resume(key, 3), 3).ended()
    assert audit.position == 3
    assert audit.error is not None
    assert audit.error.code == ErrorCode.ERROR_CODE_GAP
    assert audit.error.reason.startswith("tokens 3 to ")
    assert audit.error.emitted_tokens == 3
    assert audit.error.generated_tokens >= position
