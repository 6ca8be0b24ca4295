"""How many tokens a second come with and without logprobs: rounds in turn, so that whatever else runs meets all."""

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TextPrompt
from tokenbus_services.cli.demonstration.asking import PROMPTS, ask
from tokenbus_services.cli.errors import CommandError
from tokenbus_services.client import Client

MODES: dict[str, int | None] = {"ids only": None, "k = 0": 0, "k = 20": 20}
"""By name: how many alternatives are asked for with each token; None: not even its own logprob."""
_ROUNDS = 3
REQUESTS, _TOKENS = 256, 200


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens a second: the median of the rounds, and the lowest and the highest of them."""

    median: float
    lowest: float
    highest: float


async def rates(
    client: Client, on_round: Callable[[int, int], None] = lambda *_: None, rounds: int = _ROUNDS
) -> dict[str, Rate]:
    """Return the rate of each mode."""
    found: dict[str, list[float]] = {name: [] for name in MODES}
    names = deque(MODES)
    for number in range(1 + rounds):
        on_round(number, 1 + rounds)
        for name in names:
            asked = await ask(client, [_endless(seed, MODES[name]) for seed in range(REQUESTS)])
            if error := next((answer.error for answer in asked.answers if answer.error), ""):
                raise CommandError(f"a request failed while the rates were measured: {error}")
            if wrong := sum(bool(a.lost or a.repeated or a.tokens != _TOKENS) for a in asked.answers):
                raise CommandError(f"{wrong} of {REQUESTS} requests had other than their {_TOKENS} tokens: {name}")
            if number:  # the first round only warms up
                found[name].append(asked.tokens / asked.seconds)
        names.rotate()
    return {name: Rate(statistics.median(values), min(values), max(values)) for name, values in found.items()}


def _endless(seed: int, top_logprobs: int | None) -> Generate:
    sampling = SamplingParameters(max_tokens=_TOKENS, seed=seed, ignore_end_token=True)
    prompt = TextPrompt(text=PROMPTS[seed % len(PROMPTS)])
    generate = Generate(text=prompt, sampling=sampling)
    if top_logprobs is not None:
        generate.top_logprobs = top_logprobs
    return generate
