"""The scores of prompts, from the engine to whoever asked: each once, all of them, whatever breaks on the way."""

import asyncio
from random import Random
from typing import Any

import numpy as np
import pytest

import tokenbus.testing
from tests.in_process.test_token_extras import WISHES
from tests.in_process.test_token_extras import check as check_extras
from tests.support.campaigns import many
from tests.support.disturbance import disturb
from tokenbus.client import Client, RequestEnd
from tokenbus.client.tokens import Generation
from tokenbus.delivery import RequestFailedError, Token
from tokenbus.engines.synthetic import SyntheticEngine, true_prompt_scores, true_tokens
from tokenbus_contracts import PromptScores, RowStatus
from tokenbus_contracts.generated.request_pb2 import PromptScoring

ARRAYS = ("token_ids", "logprobs", "ranks", "alternative_token_ids", "alternative_logprobs")
LONG = list(range(1, 3001))
"""Its scores come in several chunks."""


def check(found: PromptScores | None, key: int, prompt: list[int], **asked: Any) -> None:  # noqa: ANN401
    assert found is not None
    true = true_prompt_scores(key, prompt, PromptScoring(**asked))
    assert (found.position, found.prompt_tokens, found.is_last) == (true.position, len(prompt), True)
    assert all(np.array_equal(getattr(found, name), getattr(true, name)) for name in ARRAYS)


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"prompt_logprobs": 0}, {}),
        ({"prompt_logprobs": 20}, {"top_logprobs": 20}),
        ({"prompt_logprobs": 1, "prompt_logprob_start": 7}, {"top_logprobs": 1, "first_position": 7}),
        ({"prompt_logprob_token_ids": [9, 7, 9, 300]}, {"token_ids": [9, 7, 9, 300]}),
        ({"prompt_logprob_token_ids": range(256)}, {"token_ids": range(256)}),
        ({"prompt_logprobs": 2, "prompt_logprob_start": 5000}, {"top_logprobs": 2, "first_position": 5000}),
    ],
)
@pytest.mark.parametrize("prompt", [[5], [5, 6], LONG], ids=["1", "2", "3000"])
@pytest.mark.parametrize("most", [0, 4])
async def test_scores_are_there_before_the_first_token(
    prompt: list[int], given: dict[str, Any], asked: dict[str, Any], most: int
) -> None:
    async with tokenbus.testing.bus() as bus, bus.client.generate(prompt, max_tokens=most, **given) as generation:
        tokens = []
        async for token in generation:
            check(generation.prompt_scores, generation.request_id, prompt, **asked)
            tokens.append(token.id)
        check(generation.prompt_scores, generation.request_id, prompt, **asked)
        assert generation.status is RowStatus.FINISHED_LENGTH
        assert tokens == true_tokens(generation.request_id, 0, most).ids.tolist()


async def test_end_of_a_submitted_request_has_them() -> None:
    async with tokenbus.testing.bus() as bus, bus.client.steps() as steps:
        key = bus.client.submit(LONG, max_tokens=2, prompt_logprobs=3)
        while not isinstance(item := await anext(steps), RequestEnd):
            pass
        check(item.prompt_scores, key, LONG, top_logprobs=3)


async def _read(generation: Generation) -> list[Token]:
    return [token async for token in generation]


def _ask(client: Client, random: Random) -> tuple[Generation, list[int], int, dict[str, Any]]:
    prompt, k = LONG[: random.choice([1, 40, 800, 3000])], random.choice([0, 5, 20])
    extras = random.choice(WISHES)
    return client.generate(prompt, max_tokens=random.choice([0, 30]), prompt_logprobs=k, **extras), prompt, k, extras


@pytest.mark.long
@pytest.mark.parametrize("seed", range(many(150, 4)))
@pytest.mark.parametrize("processors", [1, 2])
async def test_no_score_is_lost_or_comes_twice(seed: int, processors: int) -> None:
    """Processors are restarted, connections cut, and messages lost and repeated while scores are on their way.

    Rows of every kind of wish for tokens' extras share steps meanwhile.
    """
    random = Random(seed)  # noqa: S311 - the same each time, and no secret
    parts = random.choice([1, 2])
    async with tokenbus.testing.bus(lambda: SyntheticEngine(parts=parts), workers=2, processors=processors) as bus:
        line, asked, reading = bus.line(bus.client), [], []
        for _ in range(6):
            asked += [_ask(bus.client, random) for _ in range(3)]
            reading += [asyncio.create_task(_read(generation)) for generation, *_ in asked[-3:]]
            await bus.settle(random.randrange(12))
            await disturb(bus, line, random, turns=30, processors=processors)
        ends = await bus.until(asyncio.gather(*reading, return_exceptions=True))
        for (generation, prompt, k, extras), end in zip(asked, ends, strict=True):
            if isinstance(end, RequestFailedError):
                assert (end.code_name, processors) == ("no_worker", 2), "its processor had lost its workers"
                continue
            assert not isinstance(end, BaseException)
            check(generation.prompt_scores, generation.request_id, prompt, top_logprobs=k)
            check_extras(end, generation.request_id, extras)


async def test_scores_without_room_end_their_request_alone() -> None:
    settings = {"worker.retention_bytes": 2_200_000, "worker.policy": "fail"}
    async with tokenbus.testing.bus(settings=settings) as bus:
        large = bus.client.generate(LONG * 5, max_tokens=2, prompt_logprobs=20)
        small = bus.client.generate([1, 2, 3], max_tokens=2, prompt_logprobs=20)
        with pytest.raises(RequestFailedError, match=r"room|retention|lost"):
            await bus.until(_read(large))
        assert len(await bus.until(_read(small))) == 2
        check(small.prompt_scores, small.request_id, [1, 2, 3], top_logprobs=20)
