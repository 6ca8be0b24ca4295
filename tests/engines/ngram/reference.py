"""The model once more, as plainly as can be: the whole distribution for every token."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tests.engines.ngram.training.learning import CONTINUATIONS, Context, Plain, documents
from tokenbus.engines.ngram.model import DRAFT_LENGTH
from tokenbus.engines.ngram.tokenizer import default_tokenizer

Floats = npt.NDArray[np.float64]
Logprobs = npt.NDArray[np.float32]
LONGEST = len(CONTINUATIONS)


class Choice(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@cache
def plain() -> Plain:
    return Plain(default_tokenizer(), documents())


def context_of(tokens: Sequence[int], longest: int = LONGEST) -> Context:
    """Return the longest context that a text ends in; one token always is one."""
    for length in range(min(longest, len(tokens)), 1, -1):
        context = tuple(tokens[len(tokens) - length :])
        if context in plain().followers:
            return context
    return (tokens[-1],)


def logprobs_after(tokens: Sequence[int], longest: int = LONGEST) -> Logprobs:
    probabilities = np.zeros(default_tokenizer().vocabulary_size)
    for token, share in plain().line(context_of(tokens, longest)):
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
