"""Nightly: routers from PyPI before the gateway: each adds fields to bodies, and clients hear what the gateway says."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.ports import free_ports
from tests.support.waiting import until
from tests.system.serving import Served, answers, asking, plainly, served
from tokenbus.engines.synthetic import true_tokens

pytestmark = pytest.mark.xdist_group("routers")
MODEL = "tokenbus"
COUNT = 12
LISTS = ("tokens", "token_logprobs", "top_logprobs")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": COUNT, "logprobs": 2}
CHAT: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_completion_tokens": COUNT,
    "logprobs": True, "top_logprobs": 2, "tools": TOOLS,
}  # fmt: skip
ROUTERS = {
    "smg": ("smg", "launch"),
    "sglang-router": ("sglang_router", "launch"),
    "vllm-router": ("vllm_router.launch_router",),
}
"""By the name on PyPI the module, and its arguments before all others."""


@pytest.fixture(scope="module")
def system() -> Iterator[Served]:
    with served(gateway__tokenizer="numbers") as system:
        system.start_worker()
        yield system


def start_router(system: Served, name: str, arguments: Sequence[str]) -> str:
    port, metrics = free_ports(2)
    command = [
        *(sys.executable, "-m", *arguments, "--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", system.url, "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)),
    ]
    system.deployment.start(name, command)
    return f"http://127.0.0.1:{port}"


async def is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return await answers(client, "/readiness")
    except httpx.TransportError:
        return False


def check(key: str, ids: Sequence[str], logprobs: Sequence[float]) -> None:
    true = true_tokens(int(key.rpartition("-")[2], 16), 0, COUNT)
    assert list(ids) == [f" {token}" for token in true.ids.tolist()]
    assert np.array(logprobs, np.float32).tobytes() == true.logprobs.tobytes()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ROUTERS)
async def test_answers_come_through_a_router(system: Served, name: str) -> None:
    url = start_router(system, name, ROUTERS[name])
    async with plainly(url) as plain, asking(url) as client:
        await until(lambda: is_ready(plain))
        whole = await client.completions.create(**COMPLETION)
        lists = whole.choices[0].logprobs
        assert lists is not None
        check(whole.id, lists.tokens or (), lists.token_logprobs or ())
        chunks = [chunk async for chunk in await client.completions.create(**COMPLETION, stream=True)]
        found = [chunk.choices[0].logprobs for chunk in chunks]
        tokens = [token for each in found if each for token in each.tokens or ()]
        check(chunks[0].id, tokens, [value for each in found if each for value in each.token_logprobs or ()])
        assert "".join(chunk.choices[0].text for chunk in chunks) == "".join(tokens)
        chat = await client.chat.completions.create(**CHAT)
        assert chat.choices[0].logprobs is not None
        entries = chat.choices[0].logprobs.content or []
        check(chat.id, [entry.token for entry in entries], [entry.logprob for entry in entries])
        assert chat.choices[0].message.content == "".join(entry.token for entry in entries)
        parts = [part async for part in await client.chat.completions.create(**CHAT, stream=True)]
        given = [part.choices[0].logprobs for part in parts]
        entries = [entry for each in given if each for entry in each.content or ()]
        check(parts[0].id, [entry.token for entry in entries], [entry.logprob for entry in entries])
