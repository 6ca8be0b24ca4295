"""What the demo does: it asks for answers, computes the true ones without a bus, and measures rates."""

import asyncio
import json
import statistics
import time
import urllib.request
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenbus_contracts import BatchKind, Limits, Row
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TextPrompt
from tokenbus_services.cli.errors import CommandError
from tokenbus_services.client import Client
from tokenbus_services.delivery import RequestFailedError
from tokenbus_services.plugins import load_tokenizer
from tokenbus_services.printable import printable
from tokenbus_services.settings import Settings
from tokenbus_services.terminal import styled
from tokenbus_services.worker import StepAssembler, make_engine

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
class Answers:
    """All of the answers, and how long they took together."""

    answers: Sequence[Answer]
    seconds: float

    @property
    def tokens(self) -> int:
        """The tokens of all."""
        return sum(answer.tokens for answer in self.answers)


def requests(count: int, tokens: int) -> list[Generate]:
    """Return so many requests for up to so many tokens, each with a seed of its own: what comes of them is known."""
    wanted = [_generate(number, TOP_LOGPROBS, max_tokens=tokens, temperature=0.8) for number in range(count)]
    for number, generate in enumerate(wanted):
        generate.request_key = number + 1
    return wanted


def _generate(number: int, top_logprobs: int | None, **sampling: Any) -> Generate:  # noqa: ANN401 - its fields
    # The sample that is shown is the first answer: with this seed it is long enough to look at.
    prompt = TextPrompt(text=PROMPTS[number % len(PROMPTS)])
    return Generate(text=prompt, sampling=SamplingParameters(seed=number + 10, **sampling), top_logprobs=top_logprobs)


async def ask(
    client: Client, wanted: Sequence[Generate], on_news: Callable[[int, int], None] = lambda *_: None
) -> Answers:
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
    return Answers(answers, time.perf_counter() - begin)


Truth = dict[int, list[Row]]
_COLUMNS = ("token_ids", "logprobs", "ranks", "alternative_token_ids", "alternative_logprobs")


def computed(wanted: Iterable[Generate], limits: Limits) -> Truth:
    """Return each request's rows, by its key: with one seed the engine gives the same numbers wherever it runs."""
    engine = make_engine("ngram", Settings(limits=limits))
    assembler = StepAssembler(limits, engine.vocabulary_size)
    for generate in wanted:
        engine.admit(generate)
    rows: Truth = defaultdict(list)
    while engine.has_work:
        for arrays in engine.step():
            for batch in assembler.assemble(arrays):
                if batch.header.kind is BatchKind.TARGET:
                    for row in batch.rows():
                        rows[row.key].append(row)
    return rows


def differing(answers: Sequence[Answer], truth: Truth) -> int:
    """Return how many answers are not, bit by bit, what they must be: ids, logprobs, ranks and alternatives."""
    return sum(not _same(answer.rows, truth.get(answer.generate.request_key, [])) for answer in answers)


def _same(came: Sequence[Row], true: Sequence[Row]) -> bool:
    ends = [rows[-1].status if rows else None for rows in (came, true)]
    return ends[0] == ends[1] and all(_joined(came, name) == _joined(true, name) for name in _COLUMNS)


def _joined(rows: Sequence[Row], column: str) -> bytes:
    parts = [np.asarray(getattr(row, column)).ravel() for row in rows if row.token_ids.size]
    return np.concatenate(parts).tobytes() if parts else b""


_SECONDS = 20.0
_MOST_BYTES = 1_048_576
_HTTP_TOKENS, _HTTP_SEED = 12, 1
_BODY = {"model": "tokenbus", "prompt": PROMPTS[0], "max_tokens": _HTTP_TOKENS, "seed": _HTTP_SEED, "logprobs": 1}


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What came by HTTP, and what had to come."""

    url: str
    text: str
    tokens: int
    true_text: str
    true_tokens: int

    @property
    def is_right(self) -> bool:
        """Whether it is what the same request gives in an engine without a bus and a gateway."""
        return (self.text, self.tokens) == (self.true_text, self.true_tokens)

    def line(self) -> str:
        """Return it as a line."""
        line = f"   by HTTP, at {self.url}: {printable(self.text)!r}, {self.tokens} tokens"
        if self.is_right:
            return line
        return styled(f"{line}, and NOT {printable(self.true_text)!r}, {self.true_tokens} tokens", "red")


async def http_answer(address: str, limits: Limits) -> HttpAnswer | None:
    """Return an answer of the gateway beside the true one, or None where there is no gateway."""
    if not address:
        return None
    url = f"http://{address}/v1/completions"
    try:
        text, count = await asyncio.to_thread(_answer, url)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CommandError(f"the gateway at {address} did not answer as it should: {error}") from None
    return HttpAnswer(url, text, count, *await asyncio.to_thread(_truth, limits))


def _answer(url: str) -> tuple[str, int]:
    request = urllib.request.Request(  # noqa: S310 - our own gateway's, on this host
        url, json.dumps(_BODY).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:  # noqa: S310 - as above
        found = json.loads(answer.read(_MOST_BYTES))
    choice = found["choices"][0]
    return str(choice["text"]), len(choice["logprobs"]["token_logprobs"])


def _truth(limits: Limits) -> tuple[str, int]:
    sampling = SamplingParameters(max_tokens=_HTTP_TOKENS, seed=_HTTP_SEED, temperature=1.0)
    generate = Generate(request_key=1, text=TextPrompt(text=PROMPTS[0]), sampling=sampling)
    ids = [int(token_id) for row in computed([generate], limits)[1] for token_id in row.token_ids]
    return b"".join(map(load_tokenizer("ngram").token_bytes, ids)).decode(errors="replace"), len(ids)


MODES: dict[str, int | None] = {"ids only": None, "k = 0": 0, "k = 20": 20}
"""By name: how many alternatives are asked for with each token; None: not even its own logprob."""
_ROUNDS = 3
RATE_REQUESTS, RATE_TOKENS = 256, 100


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens a second: the median of the rounds, and the lowest and the highest of them."""

    median: float
    lowest: float
    highest: float


async def rates(client: Client, on_round: Callable[[int, int], None] = lambda *_: None) -> dict[str, Rate]:
    """Return the rate of each mode."""
    found: dict[str, list[float]] = {name: [] for name in MODES}
    names = deque(MODES)
    for number in range(1 + _ROUNDS):
        on_round(number, 1 + _ROUNDS)
        for name in names:
            asked = {"max_tokens": RATE_TOKENS, "ignore_end_token": True}
            results = await ask(client, [_generate(seed, MODES[name], **asked) for seed in range(RATE_REQUESTS)])
            if error := next((answer.error for answer in results.answers if answer.error), ""):
                raise CommandError(f"a request failed while the rates were measured: {error}")
            if wrong := sum(bool(a.lost or a.repeated or a.tokens != RATE_TOKENS) for a in results.answers):
                raise CommandError(
                    f"{wrong} of {RATE_REQUESTS} requests had other than their {RATE_TOKENS} tokens: {name}"
                )
            if number:  # the first round only warms up
                found[name].append(results.tokens / results.seconds)
        names.rotate()
    return {name: Rate(statistics.median(values), min(values), max(values)) for name, values in found.items()}
