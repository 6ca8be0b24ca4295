"""The gateway in front of a running system: many clients, and processes that end while they are served."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.waiting import soon
from tests.system.serving import Served, asking, plainly, served

pytestmark = pytest.mark.xdist_group("gateway")
MODEL = "tokenbus"
LONG = 100_000
NUMBERS = {"gateway__tokenizer": "numbers"}


@pytest.fixture(scope="module")
def numbers() -> Iterator[Served]:
    """Run a system whose tokens a test can compute again."""
    with served(**NUMBERS) as system:
        system.start_worker("worker-0", "--drafts")
        yield system


async def test_stream_of_a_killed_worker_ends_with_an_error() -> None:
    patience = {"bus__heartbeat_timeout_ms": 1000}
    with served(**NUMBERS, **patience) as system:
        worker = system.start_worker()
        async with asking(system.url) as client, plainly(system.url) as plain:
            given: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": LONG}
            stream = await client.completions.create(**given, stream=True)
            whole = asyncio.create_task(client.completions.create(**given))
            got = []

            async def read() -> None:
                async for chunk in stream:
                    got.append(chunk)
                    if len(got) == 5:
                        worker.kill()

            with pytest.raises(openai.APIError) as raised:
                await soon(read())
            assert raised.value.code == "worker_lost"
            assert f"(after {3 * len(got)} tokens)" in raised.value.message
            with pytest.raises(openai.InternalServerError) as refused:
                await soon(whole)
            assert refused.value.status_code == 502
            logged = await asyncio.to_thread(system.gateway.wait_for, '"event":"request failed"')
            assert '"code":"worker_lost"' in logged
            assert len(refused.value.response.headers["x-request-id"]) == 16
            page = (await plain.get("/metrics")).text
            assert 'tokenbus_gateway_broken_answers_total{code="worker_lost"} 1.0' in page


async def test_stopping_gateway_lets_streams_end(numbers: Served) -> None:
    program, url = await asyncio.to_thread(numbers.start_gateway, gateway__drain_timeout_ms=1000)
    async with asking(url) as client:
        short = await client.completions.create(model=MODEL, prompt="a", max_tokens=60, stream=True)
        long = await client.completions.create(model=MODEL, prompt="a", max_tokens=LONG, stream=True)
        ending = asyncio.create_task(asyncio.to_thread(program.terminate))
        chunks = [chunk async for chunk in short]
        assert chunks[-1].choices[0].finish_reason == "length"
        with pytest.raises(openai.APIError) as raised:
            async for _ in long:
                pass
        assert raised.value.code == "stopping"
        assert await soon(ending) == 0
