"""Gateways that share a port: each takes connections, ends what another one began, and leaves without a loss."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from tests.support.waiting import MOST, soon, until
from tests.system.bytewise import GATEWAY
from tests.system.deployment import Deployment
from tests.system.programs import Program
from tests.system.serving import asking, plainly, served
from tokenbus.bus import AddressError
from tokenbus.engines import synthetic
from tokenbus.gateway.server import serve_gateway
from tokenbus.settings import SettingsError

pytestmark = pytest.mark.xdist_group("gateway")
_MOST_CONNECTIONS = 64
"""Of so many connections the kernel gives some to each gateway."""


@dataclass
class Pair:
    gateways: tuple[Program, Program]
    url: str


@pytest.fixture
def pair() -> Iterator[Pair]:
    shared = {"gateway__reuse_port": True, "gateway__control": True, "gateway__tokenizer": "numbers"}
    own = {"gateway__metrics_address": "127.0.0.1:0", "gateway__drain_timeout_ms": round(MOST * 1000)}
    with served(**shared, **own) as system:
        system.start_worker("worker-0", "--steps-per-second", "50")
        second, url = system.start_gateway(gateway__address=system.url.removeprefix("http://"))
        assert url == system.url
        yield Pair((system.gateway, second), url)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as made:
        yield made


def _metrics_url(gateway: Program) -> str:
    return str(json.loads(gateway.wait_for('"serving metrics"'))["address"])


async def _health(gateway: Program) -> dict[str, Any]:
    async with plainly(_metrics_url(gateway)) as client:
        found: dict[str, Any] = (await client.get("/healthz")).json()
        return found


async def _stream(stack: AsyncExitStack, url: str) -> AsyncIterator[dict[str, Any]]:
    client = await stack.enter_async_context(plainly(url))
    asked: dict[str, Any] = {"model": "tokenbus", "prompt": [1], "max_tokens": 1_000_000, "stream": True}
    response = await stack.enter_async_context(client.stream("POST", "/v1/completions", json=asked))
    assert response.status_code == 200
    return (json.loads(line[6:]) async for line in response.aiter_lines() if line.startswith("data: {"))


async def _abort(client: httpx.AsyncClient, *names: str) -> None:
    answer = await client.post("/abort_requests", json={"request_ids": names})
    assert answer.json() == {"status": "aborted"}


async def _check_rest(first: dict[str, Any], rest: AsyncIterator[dict[str, Any]]) -> None:
    chunks = [first] + [chunk async for chunk in rest]
    assert chunks[-1]["choices"][0]["finish_reason"] == "abort"
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    true = synthetic.true_tokens(int(first["id"].rpartition("-")[2], 16), 0, text.count(" "))
    assert text == "".join(f" {token}" for token in true.ids.tolist())


async def test_gateway_that_leaves_loses_nothing(pair: Pair, stack: AsyncExitStack) -> None:
    streams: list[AsyncIterator[dict[str, Any]]] = []
    while not all([(await _health(each))["open_requests"] for each in pair.gateways]):
        assert len(streams) < _MOST_CONNECTIONS
        streams.append(await _stream(stack, pair.url))
    begun = [await anext(stream) for stream in streams]
    first, second = pair.gateways
    leaving = asyncio.create_task(asyncio.to_thread(first.terminate))

    async def is_draining() -> bool:
        return bool((await _health(first))["is_draining"])

    await until(is_draining)
    for _ in range(16):
        async with plainly(pair.url) as client:
            assert (await client.get("/readyz")).status_code == 200
    assert not leaving.done()
    async with plainly(pair.url) as client:
        await _abort(client, *[chunk["id"] for chunk in begun])
    for chunk, stream in zip(begun, streams, strict=True):
        await _check_rest(chunk, stream)
    assert await leaving == 0
    assert second.is_running


async def test_port_is_shared_by_those_that_say_so(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    first = deployment.settings(**GATEWAY, gateway__reuse_port=True)
    async with serve_gateway(first) as served:
        at = {**GATEWAY, "gateway__address": served.address}
        async with serve_gateway(deployment.settings(**at, gateway__reuse_port=True)) as other:
            assert other.address == served.address
        with pytest.raises(AddressError, match="taken: something listens there already"):
            await serve_gateway(deployment.settings(**at)).__aenter__()
    monkeypatch.delattr("socket.SO_REUSEPORT")
    with pytest.raises(SettingsError, match=r"gateway.reuse_port: false if the system has no SO_REUSEPORT, got True"):
        await serve_gateway(first).__aenter__()


async def test_stopping_gateway_lets_streams_end() -> None:
    with served(gateway__tokenizer="numbers", gateway__drain_timeout_ms=1000) as system:
        system.start_worker("worker-0", "--drafts")
        async with asking(system.url) as client:
            asked: dict[str, Any] = {"model": "tokenbus", "prompt": "a", "stream": True}
            short, long = [await client.completions.create(**asked, max_tokens=most) for most in (60, 100_000)]
            ending = asyncio.create_task(asyncio.to_thread(system.gateway.terminate))
            chunks = [chunk async for chunk in short]
            assert chunks[-1].choices[0].finish_reason == "length"
            with pytest.raises(openai.APIError) as raised:
                async for _ in long:
                    pass
            assert raised.value.code == "stopping"
            assert await soon(ending) == 0
