"""An example consumer that samples several answers at once, written as another company would write it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import tokenbus


@dataclass
class Sample:
    """An answer with the values that a trainer needs."""

    tokens: list[int]
    logprob: float
    """The sum of the logprobs of the answer's tokens."""
    workers: int
    """The number of workers that computed the answer, above 1 if a worker was lost."""


class Sampler:
    """Samples answers to prompts, several at once."""

    def __init__(self, client: tokenbus.Client, *, at_once: int = 8, max_tokens: int = 64) -> None:
        self._client = client
        self._room = asyncio.Semaphore(at_once)
        self._max_tokens = max_tokens

    async def sample(self, prompts: Sequence[Sequence[int]]) -> list[Sample]:
        """Return the answers in the order of the prompts.

        Raises an ExceptionGroup of RequestFailedError if a prompt fails.
        """
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(self._one(prompt)) for prompt in prompts]
        return [answer.result() for answer in answers]

    async def _one(self, prompt: Sequence[int]) -> Sample:
        async with self._room:
            sample = Sample([], 0.0, 0)
            generation = self._client.generate(prompt, max_tokens=self._max_tokens, top_logprobs=0)
            async for token in generation:
                sample.tokens.append(token.id)
                sample.logprob += token.logprob or 0.0
            sample.workers = len(generation.turns)
            return sample


async def main() -> None:
    """Sample answers from the bus whose address is in the environment."""
    async with tokenbus.connect(name="sampler") as client:
        for sample in await Sampler(client).sample([[1, 2, 3], [4, 5, 6]]):
            print(sample)


if __name__ == "__main__":
    asyncio.run(main())
