"""docs/extending.md: the engine there is a worker like any other, and what it says of its tokens is true."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from tests.pages import blocks, module_of
from tests.support.serving import serve
from tests.support.waiting import MOST, until
from tokenbus.bus.memory import MemoryTransport
from tokenbus.client import Client, Generation
from tokenbus.delivery import Step
from tokenbus.delivery.step import Token
from tokenbus.processor import Processor
from tokenbus.settings import Settings
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TokenPrompt

(BLOCK,) = [block for block in blocks("python", of="docs/extending.md") if "class WordEngine" in block.text]
EXAMPLE: Any = module_of(BLOCK, "words")
ADDRESSES = {"bus.workers_address": "memory://workers", "bus.clients_address": "memory://clients"}


def asked(key: int, words: list[int], max_tokens: int, **rest: Any) -> Generate:  # noqa: ANN401 - fields of any type
    prompt, sampling = TokenPrompt(token_ids=words), SamplingParameters(max_tokens=max_tokens)
    return Generate(request_key=key, tokens=prompt, sampling=sampling, **rest)


def true_words(word: int, count: int) -> list[int]:
    """Return the words that follow one, where the most probable is always taken."""
    words = []
    for _ in range(count):
        word = int(np.argmax(EXAMPLE.TARGET[word]))
        words.append(word)
    return words


def logprobs_after(model: np.ndarray[Any, Any], word: int) -> np.ndarray[Any, Any]:
    logits = model[word].astype(np.float64)
    values: np.ndarray[Any, Any] = logits - np.log(np.exp(logits).sum())
    return values


@asynccontextmanager
async def running() -> AsyncIterator[tuple[Processor, Client]]:
    """Run the engine as a worker beside a processor and a client, within this event loop."""
    settings = Settings.load(environment={}, overrides={**ADDRESSES})
    transport, stop = MemoryTransport(settings.bus), asyncio.Event()
    async with Processor(settings, transport=transport) as processor, Client(settings, transport=transport) as client:
        working = asyncio.create_task(serve(EXAMPLE.WordEngine(), settings, stop, transport=transport))
        await until(lambda: processor.workers.by_id)
        try:
            yield processor, client
        finally:
            stop.set()
            await asyncio.wait_for(working, MOST)


async def taken(tokens: Generation) -> list[Token]:
    """Return all of a request's tokens."""
    return [token async for token in tokens]


async def test_tokens_are_the_model_s_whoever_else_asks() -> None:
    """Requests with alternatives, with none and with ids alone get the model's words, each at its place, beside others.

    Logprobs, ranks and alternatives are those of a log-softmax in double precision.
    """
    async with running() as (_, client), asyncio.timeout(MOST):
        requests = [
            client.generate(asked(2**63 + 1, [5, 3], 40, top_logprobs=4)),
            client.generate(asked(2, [9], 17, top_logprobs=0)),
            client.generate(asked(3, [60], 23)),
        ]
        full, scored, plain = await asyncio.gather(*map(taken, requests))
    assert [token.id for token in full] == true_words(3, 40)
    assert [token.id for token in scored] == true_words(9, 17)
    assert [token.id for token in plain] == true_words(60, 23)
    assert [token.position for token in full] == list(range(40))
    assert all(token.logprob is None for token in plain)
    assert not any(token.alternatives for token in scored)
    for word, token in zip([3, *true_words(3, 39)], full, strict=True):
        true = logprobs_after(EXAMPLE.TARGET, word)
        assert token.rank == 1
        assert [number for number, _ in token.alternatives] == np.argsort(-true)[:4].tolist()
        assert token.logprob == pytest.approx(true[token.id], abs=2e-6)
        assert [value for _, value in token.alternatives] == pytest.approx(np.sort(true)[::-1][:4], abs=2e-6)


async def test_drafts_are_verified_and_shown() -> None:
    """A step brings as many words as were drafted right and one more; drafts have the draft model's own logprobs."""
    async with running() as (processor, client), asyncio.timeout(MOST):
        feed, steps = processor.steps(), list[Step]()
        tokens = client.generate(asked(7, [6], 40, top_logprobs=1, include_draft_logprobs=True))
        while not steps or steps[-1].target.statuses[0] != RowStatus.FINISHED_LENGTH:
            steps.append(await anext(feed))
        await feed.aclose()
        assert len(await taken(tokens)) == 40
    word, counts = 6, []
    for step in steps:
        assert step.draft is not None
        first, second = step.draft.token_ids.tolist()
        assert [first, second] == EXAMPLE.drafted(word)
        expected = [logprobs_after(EXAMPLE.DRAFT, word)[first], logprobs_after(EXAMPLE.DRAFT, first)[second]]
        np.testing.assert_allclose(step.draft.logprobs, expected, atol=2e-6)
        words = step.target.token_ids.tolist()
        assert words == true_words(word, len(words))
        assert step.target.draft_token_counts.tolist() == [2]
        counts.append(len(words))
        word = words[-1]
    assert set(counts[:-1]) == {1, 2, 3}  # nothing, one and both of the drafts were right
