"""What the demo does: it asks for answers, computes the true ones without a bus, and measures rates."""

import argparse
import asyncio
import json
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenbus.cli.errors import CommandError
from tokenbus.cli.terminal import Progress
from tokenbus.client import Client
from tokenbus.delivery import RequestFailedError
from tokenbus.plugins import load_tokenizer
from tokenbus.settings import Settings
from tokenbus.worker import StepAssembler, engine_kind
from tokenbus_contracts import BatchKind, Limits, Row
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TextPrompt

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


def requests(count: int, tokens: int) -> list[Generate]:
    """Return so many requests for up to so many tokens, each with a seed of its own: the true answers are known."""
    wanted = [_generate(number, TOP_LOGPROBS, max_tokens=tokens, temperature=0.8) for number in range(count)]
    for number, generate in enumerate(wanted):
        generate.request_key = number + 1
    return wanted


def _generate(number: int, top_logprobs: int | None, **sampling: Any) -> Generate:  # noqa: ANN401 - its fields
    # The sample that is shown is the first answer: with this seed it is long enough to look at.
    prompt = TextPrompt(text=PROMPTS[number % len(PROMPTS)])
    return Generate(text=prompt, sampling=SamplingParameters(seed=number + 10, **sampling), top_logprobs=top_logprobs)


async def ask(
    client: Client, wanted: Sequence[Generate], progress: Progress | None = None
) -> tuple[list[Answer], float]:
    """Ask for everything at once; return the answers, and how many seconds all took."""
    answers = [Answer(generate) for generate in wanted]

    async def take(answer: Answer) -> None:
        try:
            async for row in client.generate(answer.generate).rows():
                answer.take(row)
                if progress is not None:
                    progress.show(lambda: f"{sum(each.tokens for each in answers):,} tokens")
        except RequestFailedError as error:
            answer.error = str(error)

    begin = time.perf_counter()
    await asyncio.gather(*map(take, answers))
    return answers, time.perf_counter() - begin


Truth = dict[int, list[Row]]
_COLUMNS = ("token_ids", "logprobs", "ranks", "alternative_token_ids", "alternative_logprobs")


def computed(wanted: Iterable[Generate], limits: Limits) -> Truth:
    """Return each request's rows, by its key: with one seed the engine gives the same numbers wherever it runs."""
    kind, parser = engine_kind("ngram"), argparse.ArgumentParser()
    kind.declare(parser)
    engine = kind.make(parser.parse_args([]), Settings(limits=limits))
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


def acceptance(answers: Sequence[Answer]) -> list[tuple[int, int]]:
    """Return how many tokens of each head that drafted were verified, and how many of those accepted."""
    rows = [row for answer in answers for row in answer.rows if row.token_ids.size]
    most = max((row.draft_token_count for row in rows), default=0)
    return [
        (
            sum(head <= row.draft_token_count for row in rows),
            # The last token of a row is the target's own.
            sum(head <= min(row.token_ids.size - 1, row.draft_token_count) for row in rows),
        )
        for head in range(1, most + 1)
    ]


_SECONDS = 20.0
_MOST_BYTES = 1_048_576
_HTTP_TOKENS, _HTTP_SEED = 12, 1
_BODY = {"model": "tokenbus", "prompt": PROMPTS[0], "max_tokens": _HTTP_TOKENS, "seed": _HTTP_SEED, "logprobs": 1}


async def http_fault(gateway: str, limits: Limits) -> str:
    """Return how a gateway's answer differs from what an engine without a bus gives; empty: it does not."""
    try:
        came = await asyncio.to_thread(_http_answer, f"{gateway}/v1/completions")
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CommandError(f"the gateway at {gateway} did not answer as it should: {error}") from None
    true = await asyncio.to_thread(_true_answer, limits)
    return "" if came == true else f"{came[1]} tokens, {came[0]!r}, and NOT {true[1]} tokens, {true[0]!r}"


def _http_answer(url: str) -> tuple[str, int]:
    request = urllib.request.Request(  # noqa: S310 - our own gateway's, on this host
        url, json.dumps(_BODY).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:  # noqa: S310 - as above
        choice = json.loads(answer.read(_MOST_BYTES))["choices"][0]
    return str(choice["text"]), len(choice["logprobs"]["token_logprobs"])


def _true_answer(limits: Limits) -> tuple[str, int]:
    sampling = SamplingParameters(max_tokens=_HTTP_TOKENS, seed=_HTTP_SEED, temperature=1.0)
    generate = Generate(request_key=1, text=TextPrompt(text=PROMPTS[0]), sampling=sampling)
    ids = [int(token_id) for row in computed([generate], limits)[1] for token_id in row.token_ids]
    return b"".join(map(load_tokenizer("ngram").token_bytes, ids)).decode(errors="replace"), len(ids)


MODES: dict[str, int | None] = {"ids only": None, "k = 0": 0, "k = 20": 20}
"""By name: how many alternatives are asked for with each token; None: not even its own logprob."""
_ROUNDS = 3
RATE_REQUESTS, RATE_TOKENS = 256, 100


async def rates(client: Client) -> dict[str, list[float]]:
    """Return the tokens a second of each mode, once for each round."""
    found: dict[str, list[float]] = {name: [] for name in MODES}
    for _ in range(1 + _ROUNDS):
        for name, top_logprobs in MODES.items():
            asked = {"max_tokens": RATE_TOKENS, "ignore_end_token": True}
            wanted = [_generate(seed, top_logprobs, **asked) for seed in range(RATE_REQUESTS)]
            answers, seconds = await ask(client, wanted)
            if error := next((answer.error for answer in answers if answer.error), ""):
                raise CommandError(f"a request failed while the rates were measured: {error}")
            if wrong := sum(bool(a.lost or a.repeated or a.tokens != RATE_TOKENS) for a in answers):
                raise CommandError(
                    f"{wrong} of {RATE_REQUESTS} requests had other than their {RATE_TOKENS} tokens: {name}"
                )
            found[name].append(RATE_REQUESTS * RATE_TOKENS / seconds)
    return {name: values[1:] for name, values in found.items()}  # the first round warms up
