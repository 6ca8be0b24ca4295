"""The engines as processes, through the whole system: tokens do not depend on which worker computes what of them."""

import asyncio

import pytest

from tests.engines.paddle.needs import NEEDS_PADDLE
from tests.system.deployment import Deployment
from tests.system.test_roles import client_of
from tokenbus.client import Client, RequestFailedError
from tokenbus.delivery import Token
from tokenbus.processor import Processor
from tokenbus_contracts.generated.request_pb2 import ErrorCode, Generate, SamplingParameters, TextPrompt, TokenPrompt

PROMPT = "In the evening the old man said"
Taken = tuple[int, float | None, int | None, tuple[int, ...]]


def asked(seed: int, model: str) -> Generate:
    """Return a request whose tokens follow from its seed."""
    sampling = SamplingParameters(max_tokens=40, seed=seed)
    return Generate(model=model, text=TextPrompt(text=PROMPT), sampling=sampling, top_logprobs=seed % 4)


async def taken(client: Client, generate: Generate) -> list[Taken]:
    """Return all of a request's tokens, with logprobs as far as two ways to compute them agree."""
    found: list[Token] = [token async for token in client.generate(generate)]
    return [
        (
            token.id,
            None if token.logprob is None else round(token.logprob, 3),
            token.rank,
            tuple(alternative for alternative, _ in token.alternatives),
        )
        for token in found
    ]


async def start(deployment: Deployment, name: str, engine: str, model: str) -> None:
    """Start a worker and wait until it is connected."""
    role = name.partition("-")[0]
    command = ["--engine", engine, "--steps-per-second", "0"]
    await asyncio.to_thread(deployment.start_worker, name, *command, worker__role=role, worker__model=model)


@pytest.mark.parametrize("engine", ["ngram", pytest.param("paddle", marks=NEEDS_PADDLE)])
async def test_tokens_are_the_same_however_the_work_is_shared(deployment: Deployment, engine: str) -> None:
    """With a seed a request has the same tokens from one worker, and from a prefill and a decode worker (case 27)."""
    async with Processor(deployment.settings(processor__drain_timeout_ms=0)) as processor:
        await start(deployment, "mixed-0", engine, "whole")
        await start(deployment, "prefill-0", engine, "parted")
        await start(deployment, "decode-0", engine, "parted")
        async with client_of(deployment) as client:
            whole = await asyncio.gather(*(taken(client, asked(seed, "whole")) for seed in range(1, 17)))
            parted = await asyncio.gather(*(taken(client, asked(seed, "parted")) for seed in range(1, 17)))
        tokens = {name: worker.stream.counts.tokens for name, worker in processor.workers.by_id.items()}
    assert parted == whole
    assert tokens["prefill-0"] == 16
    assert tokens["decode-0"] == sum(map(len, whole)) - 16


@pytest.mark.parametrize(
    ("generate", "line"),
    [
        (Generate(tokens=TokenPrompt(token_ids=[7_000])), "7000"),
        (Generate(tokens=TokenPrompt(token_ids=[1] * 3000)), "3000"),
        (Generate(text=TextPrompt(text="a"), top_logprobs=21), "21"),
    ],
)
async def test_request_that_is_wrong_ends_alone(deployment: Deployment, generate: Generate, line: str) -> None:
    """A prompt of unknown tokens or without end, or too many alternatives, is one clear error, and others go on."""
    async with Processor(deployment.settings(processor__drain_timeout_ms=0)):
        await start(deployment, "mixed-0", "ngram", "")
        async with client_of(deployment) as client:
            beside = asyncio.create_task(taken(client, asked(1, "")))
            generate.sampling.max_tokens = 4
            with pytest.raises(RequestFailedError, match=line) as raised:
                [token async for token in client.generate(generate)]
            assert raised.value.code == ErrorCode.ERROR_CODE_INVALID_REQUEST
            assert len(await beside) > 0
