"""The arithmetic: from what a round's requests saw to its figures, and from rounds to medians and ratios."""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.errors import WrongDeliveryError
from benchmarks.http_clients import Answer

MODEL = "model"
"""The role of the process that runs the model."""
_MILLISECONDS = 1e3
_MICROSECONDS = 1e6
_HUNDREDTHS = 100


class Sample(NamedTuple):
    """One round of one system."""

    tokens_per_second: float
    first_ms: float
    """Time to the first token, the median of the requests."""
    first_p99_ms: float
    between_ms: float
    """Time between tokens, the median of the requests."""
    between_p99_ms: float
    tokens_per_event: float
    bytes_per_token: float
    client_us: float
    """Processor time of the client, for a token."""
    cpu_us: dict[str, float]
    """Processor time of each role, for a token."""
    outside_us: float | None
    """The same of all roles but the model's; None where no process of its own runs the model."""


def between_tokens(answer: Answer) -> float:
    """Return the mean time between a request's tokens, in seconds; 0 where it has but one."""
    return (answer.ended - answer.first) / (answer.tokens - 1) if answer.tokens > 1 else 0.0


def sample(answers: Sequence[Answer], cpu: dict[str, float], client_cpu: float, tokens_of_each: int) -> Sample:
    """Return the figures of a round; a WrongDeliveryError says that an answer is not as long as was asked."""
    wrong = next((each.tokens for each in answers if each.tokens != tokens_of_each), None)
    if wrong is not None:
        raise WrongDeliveryError(f"an answer has {wrong} tokens, of {tokens_of_each} that were asked for")
    tokens = sum(each.tokens for each in answers)
    took = max(each.ended for each in answers) - min(each.written for each in answers)
    first = [(each.first - each.written) * _MILLISECONDS for each in answers]
    between = [between_tokens(each) * _MILLISECONDS for each in answers]
    cpu_us = {role: seconds / tokens * _MICROSECONDS for role, seconds in cpu.items()}
    return Sample(
        tokens / took,
        statistics.median(first),
        percentile(first, 99),
        statistics.median(between),
        percentile(between, 99),
        tokens / sum(each.events for each in answers),
        sum(each.bytes for each in answers) / tokens,
        client_cpu / tokens * _MICROSECONDS,
        cpu_us,
        sum(value for role, value in cpu_us.items() if role != MODEL) if MODEL in cpu_us else None,
    )


def percentile(values: Sequence[float], hundredths: int) -> float:
    """Return the value that so many of a hundred are at most."""
    ordered = sorted(values)
    return ordered[-(-len(ordered) * hundredths // _HUNDREDTHS) - 1]


def median(samples: Sequence[Sample]) -> Sample:
    """Return the medians of rounds, figure by figure."""
    roles = dict.fromkeys(role for each in samples for role in each.cpu_us)
    outside = [each.outside_us for each in samples if each.outside_us is not None]
    numbers = [statistics.median(values) for values in list(zip(*samples, strict=True))[: -len(("cpu", "outside"))]]
    return Sample._make(
        [
            *numbers,
            {role: statistics.median(each.cpu_us.get(role, 0.0) for each in samples) for role in roles},
            statistics.median(outside) if len(outside) == len(samples) else None,
        ]
    )


def ratio(ours: Sequence[Sample], theirs: Sequence[Sample], figure: Callable[[Sample], float | None]) -> float | None:
    """Return the median of the rounds' ratios: each round is compared with the one that was taken beside it."""
    pairs = [(figure(mine), figure(other)) for mine, other in zip(ours, theirs, strict=True)]
    found = [mine / other for mine, other in pairs if mine is not None and other]
    return statistics.median(found) if len(found) == len(pairs) else None
