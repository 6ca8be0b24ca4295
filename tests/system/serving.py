"""A gateway and what it needs, as processes of a test's own, and OpenAI's client in front of it."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
from openai import AsyncOpenAI

from tests.support.waiting import MOST
from tests.system.deployment import COMMAND, Deployment
from tests.system.programs import Program
from tokenbus.engines import synthetic

_ADDRESS = re.compile(r'"address":"http://([^"]+)"')


class Served:
    def __init__(self, deployment: Deployment, **overrides: Any) -> None:  # noqa: ANN401 - any setting's value
        self.deployment = deployment
        self.processor = deployment.start_processor(processor__metrics_address="127.0.0.1:0", **overrides)
        (found,) = _ADDRESS.findall(self.processor.wait_for('"serving metrics"'))
        self.metrics = found
        self.overrides = overrides
        self.gateway, self.url = self.start_gateway(**overrides)

    def start_gateway(self, **overrides: object) -> tuple[Program, str]:
        given = {"gateway__address": "127.0.0.1:0", **self.overrides, **overrides}
        program = self.deployment.start("gateway", [COMMAND, "gateway"], **given)
        (address,) = _ADDRESS.findall(program.wait_for('"listening"'))
        program.wait_for('"connected"')
        return program, f"http://{address}"

    def start_worker(self, name: str = "worker-0", *arguments: str) -> Program:
        return self.deployment.start_worker(name, *arguments, **self.overrides)


@contextmanager
def served(**overrides: object) -> Iterator[Served]:
    with TemporaryDirectory(prefix="tb") as folder:
        deployment = Deployment(Path(folder))
        try:
            yield Served(deployment, **overrides)
        finally:
            deployment.close()


@asynccontextmanager
async def asking(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=MOST) as client:
        yield client


@asynccontextmanager
async def plainly(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=MOST) as client:
        yield client


async def answers(
    client: httpx.AsyncClient, path: str, status: int = 200, headers: dict[str, str] | None = None
) -> bool:
    return (await client.get(path, headers=headers)).status_code == status


def is_true(answer: Any, index: int = 0) -> bool:  # noqa: ANN401 - OpenAI's model of either API's answer
    """Return whether a completion's choice has exactly the true tokens of its request, of a worker without a model."""
    choice = answer.choices[index]
    count = len(choice.logprobs.tokens)
    key = (int(answer.id.rpartition("-")[2], 16) + index) % 2**64
    true = synthetic.true_tokens(key, 0, count)
    return (
        choice.text == "".join(f" {token}" for token in true.ids.tolist())
        and np.array(choice.logprobs.token_logprobs, np.float32).tobytes() == true.logprobs.tobytes()
    )


def error_of(text: str) -> dict[str, Any]:
    """Return the error that a body holds in OpenAI's shape, and nothing else."""
    body = json.loads(text)
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
