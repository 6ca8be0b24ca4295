"""Clients that do not read, many at once, beside one that does: they end at their bounds, and it gets every token."""

import asyncio
import socket
from typing import Any

import pytest

from tests.metrics.running import Scrape
from tests.support.campaigns import many
from tests.support.waiting import soon, until
from tests.system.bytewise import asked, not_reading, serving
from tests.system.deployment import Deployment
from tests.system.serving import asking, is_true, plainly, served
from tokenbus.engines.synthetic import true_tokens

pytestmark = pytest.mark.xdist_group("gateway")
UNREAD = many(500, 40)


async def test_streams_that_are_not_read_end_alone() -> None:
    sockets: list[socket.socket] = []
    bounds = {
        "gateway__stream_buffer_bytes": 2**17,
        "gateway__buffer_bytes": UNREAD * 2**16,
        "gateway__write_timeout_ms": 3000,
    }
    with served(gateway__tokenizer="numbers", **bounds) as system:
        system.start_worker("worker-0", "--steps-per-second", str(max(10, 2500 // UNREAD)))
        try:
            async with asking(system.url) as client, plainly(system.url) as plain:
                given: dict[str, Any] = {"model": "tokenbus", "prompt": "a", "max_tokens": 900, "logprobs": 0}
                stream = await client.completions.create(**given, stream=True)
                opening = asyncio.create_task(_open_all(system.url, sockets))
                chunks = [chunk async for chunk in stream]
                await opening
                whole: Any = chunks[0]
                for chunk in chunks[1:]:
                    whole.choices[0].text += chunk.choices[0].text
                    for name in ("tokens", "token_logprobs"):
                        getattr(whole.choices[0].logprobs, name).extend(getattr(chunk.choices[0].logprobs, name))
                assert is_true(whole)
                assert len(whole.choices[0].logprobs.tokens) == 900

                async def have_ended() -> bool:
                    told = Scrape((await plain.get("/metrics")).text)
                    held = [told("fill_ratio", of=each) for each in ("buffers", "requests")]
                    too_slow = told("gateway_broken_answers_total", code="slow_client") or 0
                    # An answer that is ended before its first byte is sent has a status for it.
                    unsent = told("gateway_answers_total", route="/v1/completions", status="503") or 0
                    return held == [0, 0] and too_slow + unsent == UNREAD

                await until(have_ended)
                assert is_true(await client.completions.create(**given))
            slow = '"answer ended: its client reads too slowly"'
            await asyncio.to_thread(system.gateway.wait_for, slow)
            assert len(system.gateway.lines(slow)) < UNREAD // 4
        finally:
            for stalled in sockets:
                stalled.close()


async def _open_all(url: str, sockets: list[socket.socket]) -> None:
    for _ in range(UNREAD):
        sockets.append(not_reading(url))
        await asyncio.sleep(0)


async def test_whole_answers_count_to_the_bound_of_all(deployment: Deployment) -> None:
    bounds = {
        "gateway__stream_buffer_bytes": 20_000,
        "gateway__buffer_bytes": 2**20,
        "gateway__write_timeout_ms": 3_600_000,
    }
    async with serving(deployment, **bounds) as system:
        wanted = asked(max_tokens=900, logprobs=20)
        stalled = [not_reading(system.address, wanted=wanted) for _ in range(3)]
        try:
            await until(lambda: system.gateway.buffers.evicted)
            async with asking(system.url) as client:
                given: dict[str, Any] = {"model": "tokenbus", "prompt": "a", "logprobs": 0, "max_tokens": 40}
                assert is_true(await client.completions.create(**given))
        finally:
            for each in stalled:
                each.close()
        await until(lambda: not system.gateway.buffers.size)


async def test_scores_of_prompts_end_no_other_stream() -> None:
    bounds: dict[str, Any] = {"gateway__tokenizer": "numbers", "clients__send_queue_bytes": 2**18}
    scored = {"prompt": [1] * 1000, "max_tokens": 1, "prompt_logprob_token_ids": list(range(256))}
    with served(**bounds) as system:
        system.start_worker()
        async with asking(system.url) as client, plainly(system.url) as plain:
            given: dict[str, Any] = {"model": "tokenbus", "prompt": "a", "logprobs": 0}
            stream = await client.completions.create(**given, max_tokens=100_000, stream=True)
            chunks = [await anext(stream)]
            attack = [asyncio.create_task(plain.post("/v1/completions", json=scored)) for _ in range(16)]
            reading = asyncio.create_task(_read(stream, chunks))
            answers = await soon(asyncio.gather(*attack))
            before = len(chunks)
            await until(lambda: len(chunks) > before + 10 or reading.done())
            assert not reading.done()
            reading.cancel()
    assert {answer.status_code for answer in answers} <= {200, 429, 503}
    assert system.processor.lines("slow requests")
    tokens = [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens]
    true = true_tokens(int(chunks[0].id.rpartition("-")[2], 16), 0, len(tokens))
    assert "".join(tokens) == "".join(f" {token}" for token in true.ids.tolist())


async def _read(stream: Any, chunks: list[Any]) -> None:  # noqa: ANN401 - OpenAI's stream
    async for chunk in stream:
        chunks.append(chunk)  # noqa: PERF401 - read while they come
