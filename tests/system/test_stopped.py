"""Processes that stand still for longer than the heartbeat's timeout, and go on."""

import asyncio

from tests.support.waiting import until
from tests.system.asking import all_exact, all_failed, ask, begun
from tests.system.deployment import Deployment, Overrides
from tokenbus.bus.link import SessionState
from tokenbus.client import Client
from tokenbus_contracts.generated.request_pb2 import ErrorCode

SHORT: Overrides = {"bus__heartbeat_timeout_ms": 1500}
LONG = 600_000  # tokens that no test waits for


async def test_processor_that_stands_still_loses_nothing(deployment: Deployment) -> None:
    """A processor that stood still longer than peers may be silent goes on where it was: that was its own silence."""
    processor = deployment.start_processor(**SHORT)
    deployment.start_worker(**SHORT)
    async with Client(deployment.settings(**SHORT)) as client:
        asked = ask(client, 16, 3000)
        await begun(asked)
        processor.stop()
        # The client goes by the same timeout as the processor does.
        await until(lambda: client.sessions[0].state is SessionState.GREETING)
        processor.go_on()
        await all_exact(asked, 3000)
    await asyncio.to_thread(processor.terminate)
    assert not processor.lines('"worker gone"')


async def test_worker_that_stands_still_is_lost_and_comes_back(deployment: Deployment) -> None:
    """A silent worker's requests end with an error that counts their tokens; once it goes on, it serves new ones."""
    processor = deployment.start_processor(**SHORT)
    worker = deployment.start_worker(**SHORT)
    async with Client(deployment.settings(**SHORT)) as client:
        asked = ask(client, 16, LONG)
        await begun(asked)
        worker.stop()
        await all_failed(asked, ErrorCode.ERROR_CODE_WORKER_LOST)
        worker.go_on()
        await asyncio.to_thread(worker.wait_for, '"connected"', 2)
        await all_exact(ask(client, 8, 300), 300)
    await asyncio.to_thread(processor.terminate)
    assert len(processor.lines('"worker gone"')) == 1


async def test_client_that_stands_still_loses_its_own_requests_alone(deployment: Deployment) -> None:
    """A client that reads nothing has its requests ended when too much waits for it; no other client waits for it."""
    deployment.start_processor(clients__send_queue_bytes=2_097_152, **SHORT)
    deployment.start_worker()
    slow = deployment.start_module("client_program", str(LONG), "16", **SHORT)
    async with Client(deployment.settings()) as client:
        await until(lambda: len(last_positions(slow.lines("token "))) == 16)  # each request has begun
        slow.stop()
        await all_exact(ask(client, 4, 1800, top_logprobs=0), 1800)
        slow.go_on()
        await asyncio.to_thread(slow.wait_for, "slow_client", 16)
    taken = last_positions(slow.lines("token "))
    for line in slow.lines("failed "):
        _, key, emitted, _ = line.split()
        assert int(emitted) > taken[int(key)], "the error counts what was dropped too"


def last_positions(lines: list[str]) -> dict[int, int]:
    """Return how far each request came, from the lines of a client's process; fail if one went back or stood still."""
    positions: dict[int, int] = {}
    for line in lines:
        _, key, position = line.split()
        assert int(position) > positions.get(int(key), 0) or position == "0", line
        positions[int(key)] = int(position)
    return positions
