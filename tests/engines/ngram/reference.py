"""The model once more, as plainly as can be: dictionaries, and the whole distribution for every token."""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tests.engines.ngram.training.learning import CONTINUATIONS, DISCOUNT, documents
from tokenbus.engines.ngram.model import DRAFT_LENGTH, WIDTH
from tokenbus.engines.ngram.tokenizer import default_tokenizer

Floats = npt.NDArray[np.float64]
Logprobs = npt.NDArray[np.float32]
LONGEST = len(CONTINUATIONS)


class Choice(NamedTuple):
    """How tokens are chosen."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@cache
def followers() -> dict[tuple[int, ...], Counter[int]]:
    """Return for each context how often each token came after it; the empty one has all tokens."""
    end = default_tokenizer().end_token
    tokens = [end]
    for text in documents():
        tokens += [*default_tokenizer().encode(text), end]
    found: dict[tuple[int, ...], Counter[int]] = {}
    for place in range(1, len(tokens)):
        for length in range(min(LONGEST, place) + 1):
            context = tuple(tokens[place - length : place])
            if end not in context[1:]:
                found.setdefault(context, Counter())[tokens[place]] += 1
    return found


def context_of(tokens: Sequence[int], longest: int = LONGEST) -> tuple[int, ...]:
    """Return the longest context that a text ends in; one token always is one."""
    for length in range(min(longest, len(tokens)), 1, -1):
        context = tuple(tokens[len(tokens) - length :])
        if context in followers():
            return context
    return (tokens[-1],)


@cache
def line(context: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
    """Return the likeliest tokens of a context with their shares."""
    counts = followers().get(context, Counter())
    if not context:
        masses = {token: float(count) for token, count in counts.items()}
    else:
        total = counts.total()
        left = DISCOUNT * len(counts) / total if total else 1.0
        masses = {token: share * left for token, share in line(context[1:])}
        most = CONTINUATIONS[len(context) - 1]
        for token, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]:
            masses[token] = masses.get(token, 0.0) + (count - DISCOUNT) / total
    kept = sorted(masses.items(), key=lambda item: (-item[1], item[0]))[:WIDTH]
    whole = float(np.array([mass for _, mass in kept]).sum())
    return tuple((token, mass / whole) for token, mass in kept)


def logprobs_after(tokens: Sequence[int], longest: int = LONGEST) -> Logprobs:
    """Return the logprob of every token of the vocabulary after a text."""
    size = default_tokenizer().vocabulary_size
    probabilities = np.zeros(size)
    for token, share in line(context_of(tokens, longest)):
        probabilities[token] = share
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(probabilities).astype(np.float32))


def draft_logprobs_after(tokens: Sequence[int]) -> Logprobs:
    return logprobs_after(tokens, DRAFT_LENGTH)


def ordered(logprobs: Logprobs) -> list[int]:
    """Return all tokens, the most probable first, ties by the lower id."""
    return [int(token) for token in np.lexsort((np.arange(logprobs.size), -logprobs))]


def rank(logprobs: Logprobs, token: int) -> int:
    return int((logprobs > logprobs[token]).sum()) + 1


def chosen_from(logprobs: Logprobs, choice: Choice) -> Floats:
    """Return the probability that each token is chosen with, after temperature, top-k and top-p."""
    order = ordered(logprobs)
    if choice.temperature == 0:
        return np.asarray(np.arange(logprobs.size) == order[0], np.float64)
    weights = np.exp((logprobs.astype(np.float64) - logprobs.max()) / choice.temperature)
    kept = order[: choice.top_k or None]
    added = np.cumsum(weights[kept])
    kept = kept[: int(np.searchsorted(added, choice.top_p * added[-1])) + 1]
    chances = np.zeros(logprobs.size)
    chances[kept] = weights[kept] / weights[kept].sum()
    return chances
