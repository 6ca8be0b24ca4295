"""The demo's requests, and what came of each."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenbus_contracts import Row
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TextPrompt
from tokenbus_services.client import Client
from tokenbus_services.delivery import RequestFailedError

PROMPTS = (
    "In the evening the old man said",
    "The harbour was",
    "What is",
    "In the town there",
    "She opened the door and",
    "The machine",
    "It rained all night, so",
    "The children asked",
    "In the morning the ships",
    "He looked at the river and",
)
TOP_LOGPROBS = 5


@dataclass(slots=True)
class Answer:
    """One request's rows as they came, and what was wrong with their order."""

    generate: Generate
    rows: list[Row] = field(default_factory=list)
    tokens: int = 0
    position: int = 0
    """The next token's, if none is lost and none comes twice."""
    lost: int = 0
    repeated: int = 0
    error: str = ""

    def take(self, row: Row) -> None:
        """Add the next row."""
        self.lost += max(0, row.position - self.position)
        self.repeated += max(0, self.position - row.position)
        self.position = row.position + row.token_ids.size
        self.tokens += row.token_ids.size
        self.rows.append(row)


@dataclass(frozen=True, slots=True)
class Asked:
    """All of the answers, and how long they took together."""

    answers: Sequence[Answer]
    seconds: float

    @property
    def tokens(self) -> int:
        """The tokens of all."""
        return sum(answer.tokens for answer in self.answers)


def requests(count: int, tokens: int) -> list[Generate]:
    """Return so many requests for up to so many tokens, each with a seed of its own: what comes of them is known."""
    return [
        Generate(
            request_key=number + 1,
            text=TextPrompt(text=PROMPTS[number % len(PROMPTS)]),
            sampling=SamplingParameters(max_tokens=tokens, seed=number, temperature=0.8),
            top_logprobs=TOP_LOGPROBS,
        )
        for number in range(count)
    ]


async def ask(
    client: Client, wanted: Sequence[Generate], on_news: Callable[[int, int], None] = lambda *_: None
) -> Asked:
    """Ask for everything at once and return when all has ended; tell how many requests and tokens there are so far."""
    ended = tokens = 0

    async def _answer(generate: Generate) -> Answer:
        nonlocal ended, tokens
        answer = Answer(generate)
        try:
            async for row in client.generate(generate).rows():
                answer.take(row)
                tokens += row.token_ids.size
                on_news(ended, tokens)
        except RequestFailedError as error:
            answer.error = str(error)
        ended += 1
        on_news(ended, tokens)
        return answer

    begin = time.perf_counter()
    answers = await asyncio.gather(*map(_answer, wanted))
    return Asked(answers, time.perf_counter() - begin)
