"""Two processors as processes: one is killed, and what people see is of both."""

import asyncio
from functools import partial

from tests.support.waiting import until
from tests.system.asking import all_exact, ask, begun
from tests.system.deployment import Deployment
from tests.system.programs import Program
from tests.system.serving import plainly
from tests.system.several import Several
from tokenbus.client import Client

CONNECTED = '"worker connected"'


def has_connected(processor: Program, worker_id: str) -> bool:
    return any(f'"{worker_id}"' in line for line in processor.lines(CONNECTED))


async def test_requests_go_on_at_another_processor(deployment: Deployment) -> None:
    several = Several(deployment)
    await asyncio.to_thread(several.start_all)
    for name in ("worker-0", "worker-1"):
        await asyncio.to_thread(several.worker, name)
    async with Client(several.settings()) as client:
        await several.connected(client)
        asked = ask(client, 8, 900)
        await begun(asked)
        place = max(several.processors, key=lambda place: len(several.processors[place].lines(CONNECTED)))
        assert any(not each.task.done() for each in asked)
        await asyncio.to_thread(several.processors[place].kill)
        await all_exact(asked, 900)
        await all_exact(ask(client, 8, 30), 30)
    for name in ("worker-0", "worker-1"):
        await until(partial(has_connected, several.processors[1 - place], name))


async def test_status_tap_and_gateway_show_the_workers_of_all(deployment: Deployment) -> None:
    several = Several(deployment)
    await asyncio.to_thread(several.start_all)
    models = ("small", "large")
    for place, model in enumerate(models):
        await asyncio.to_thread(several.worker, f"worker-{place}", place=place, model=model)
    _, url = await asyncio.to_thread(several.gateway)
    tap = several.tap("--json")
    async with Client(several.settings()) as client, plainly(url) as plain:
        await several.ready(client)
        status = await client.status(timeout_seconds=30)
        expected = {("worker-0", "processor-0"), ("worker-1", "processor-1")}
        assert {(each.worker_id, each.processor_id.rpartition("-")[0]) for each in status.workers} == expected

        async def has_both() -> bool:
            return {each["id"] for each in (await plain.get("/v1/models")).json()["data"]} >= set(models)

        await until(has_both, every=0.05)
        workers = (await plain.get("/bus")).json()["workers"]
        assert {(each["id"], each["processor"].rpartition("-")[0]) for each in workers} == expected

        async def is_shown(model: str, worker_id: str) -> bool:
            """Ask again until the tap, which takes a while to start, watches."""
            answer = await plain.post("/v1/completions", json={"model": model, "prompt": "1 2", "max_tokens": 5})
            assert answer.json()["usage"]["completion_tokens"] == 5
            return any(f'"{worker_id}"' in line for line in tap.lines('"batch"'))

        for place, model in enumerate(models):
            await until(partial(is_shown, model, f"worker-{place}"))
