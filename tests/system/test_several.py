"""Two processors as processes: one is killed, stands still, or drains, and every request goes on at the other."""

import asyncio
from functools import partial

import pytest

from tests.support.waiting import until
from tests.system.asking import all_exact, ask, begun
from tests.system.deployment import Deployment
from tests.system.programs import Program
from tests.system.serving import plainly
from tests.system.several import Several
from tokenbus.bus.link import SessionState
from tokenbus.client import Client
from tokenbus_contracts.generated.request_pb2 import ErrorCode

LONG = 600_000  # tokens that no test waits for
SLOW = ("--steps-per-second", "10")  # so that a busy machine keeps up
CONNECTED = '"worker connected"'


def _has_connected(processor: Program, worker_id: str) -> bool:
    return any(f'"{worker_id}"' in line for line in processor.lines(CONNECTED))


def busiest(several: Several) -> int:
    """Return the place of the processor that most workers chose."""
    return max(several.processors, key=lambda place: len(several.processors[place].lines(CONNECTED)))


@pytest.fixture
def several(deployment: Deployment) -> Several:
    """Return two processors that are listed everywhere."""
    return Several(deployment)


async def started(several: Several, *arguments: str, workers: int = 3) -> list[Program]:
    """Start two processors, and some workers."""
    await asyncio.to_thread(several.start_all)
    names = [f"worker-{number}" for number in range(workers)]
    return [await asyncio.to_thread(several.worker, name, *arguments) for name in names]


@pytest.mark.parametrize("how", ["kill", "stop", "terminate"])
async def test_requests_go_on_when_a_processor_goes(several: Several, how: str) -> None:
    """A processor is killed, stands still for longer than it may, or is asked to end: no token is lost or repeated."""
    await started(several)
    async with Client(several.settings()) as client:
        sessions = await several.connected(client)
        asked = ask(client, 8, 1200)
        await begun(asked)
        place = busiest(several)
        gone = several.processors[place]
        assert any(not each.task.done() for each in asked)
        status = await asyncio.to_thread(getattr(gone, how))
        if how == "stop":
            await until(lambda: sessions[place].state is SessionState.GREETING)
            await all_exact(ask(client, 4, 30), 30)  # the others are at the other processor by now
            gone.go_on()
        await all_exact(asked, 1200)
        await all_exact(ask(client, 8, 300), 300)
    if how == "terminate":
        assert status == 0
    if how != "stop":
        await asyncio.to_thread(several.processors[1 - place].wait_for, CONNECTED, 3)


async def test_requests_of_a_killed_worker_end_and_others_notice_nothing(several: Several) -> None:
    """A killed worker's requests end with the error that says so, once no processor has found it."""
    workers = await started(several, *SLOW)
    async with Client(several.settings()) as client:
        await several.ready(client)
        asked = ask(client, 12, LONG)
        await begun(asked)
        await asyncio.to_thread(workers[0].kill)
        await until(lambda: any(each.task.done() for each in asked))
        for each in asked:
            client.abort(each.tokens.request_id)
        audits = [await each.ended() for each in asked]
        lost = [audit for audit in audits if audit.error is not None]
        assert 0 < len(lost) < len(audits), [str(audit.error) for audit in lost]
        for audit in audits:
            assert audit.is_exact, audit
            if audit.error is not None:
                assert audit.error.code == ErrorCode.ERROR_CODE_WORKER_LOST
                assert audit.error.emitted_tokens == audit.position
        await all_exact(ask(client, 8, 300), 300)


async def test_status_and_tap_show_the_workers_of_all(several: Several) -> None:
    """Each worker is there once, with the processor that has it, and what is watched comes from all of them."""
    await started(several)
    async with Client(several.settings()) as client:
        await several.ready(client)
        status = await client.status(timeout_seconds=30)
        assert {worker.worker_id for worker in status.workers} == {"worker-0", "worker-1", "worker-2"}
        for worker in status.workers:
            place = int(worker.processor_id.split("-")[1])
            await until(partial(_has_connected, several.processors[place], worker.worker_id))
        tap = several.tap("--json")
        asked = ask(client, 12, LONG)
        for name in ("worker-0", "worker-1", "worker-2"):
            await asyncio.to_thread(tap.wait_for, f'"{name}"')
        for each in asked:
            client.abort(each.tokens.request_id)
        for each in asked:
            await each.ended()


async def test_gateway_shows_the_models_and_workers_of_all(several: Several) -> None:
    """`/v1/models` lists what workers of either processor serve, and `/bus` says at which each of them is."""
    await asyncio.to_thread(several.start_all)
    for number, model in enumerate(("small", "large")):
        await asyncio.to_thread(several.worker, f"worker-{number}", place=number, model=model)
    url = await asyncio.to_thread(several.gateway)
    async with plainly(url) as client:

        async def has_both() -> bool:
            """Tell whether the gateway knows the models of both."""
            listed = {each["id"] for each in (await client.get("/v1/models")).json()["data"]}
            return {"small", "large"} <= listed

        await until(has_both, every=0.05)
        workers = (await client.get("/bus")).json()["workers"]
        assert {(each["id"], each["processor"].rpartition("-")[0]) for each in workers} == {
            ("worker-0", "processor-0"),
            ("worker-1", "processor-1"),
        }
        for model in ("small", "large"):
            answer = await client.post("/v1/completions", json={"model": model, "prompt": "1 2", "max_tokens": 5})
            assert answer.json()["usage"]["completion_tokens"] == 5
