"""ScoredPrompt: collects the scores of a prompt's tokens, chunk by chunk."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tokenbus.engines.admission import check_ids
from tokenbus.engines.sampling import Ids, Logits
from tokenbus.worker.step import Array
from tokenbus_contracts import PromptScores
from tokenbus_contracts.generated.request_pb2 import Generate

LEAST = -9999.0
"""Logprob that is published instead of minus infinity."""


class PromptPiece(NamedTuple):
    """Prompt tokens that one chunk of a step scores."""

    chunk: int
    """Index of the chunk in the step."""
    skip: int
    """Offset of the token before the first scored token, counted from the chunk's start."""
    context: Sequence[int]
    tokens: Ids
    top_logprobs: int
    named: Ids
    """Requested ids of the alternatives. If empty, the most probable tokens are the alternatives."""


class Scores(NamedTuple):
    """Scores of tokens. Alternatives have shape [tokens, alternatives] for prompts, and are flat for output tokens."""

    logprobs: Array
    ranks: Array
    alternative_token_ids: Array
    """Ids of the alternatives, sorted by probability and then by id unless the request named the ids."""
    alternative_logprobs: Array


class ScoredPrompt:
    """A prompt with the scores that have been computed for its tokens."""

    def __init__(self, generate: Generate, prompt: Sequence[int]) -> None:
        asked = generate.prompt_scoring
        self.request_id = generate.request_id
        self.is_alone = asked.without_generation
        self._prompt = prompt
        self._first = self._next = min(max(1, asked.first_position), len(prompt))
        self._top_logprobs, self._named = asked.top_logprobs, np.array(asked.token_ids, np.int64)
        width = self._named.size or asked.top_logprobs
        nothing = np.zeros((0, width), np.int64)
        self._parts = [Scores(np.zeros(0), np.zeros(0, np.int64), nothing, np.zeros((0, width)))]

    def piece(self, chunk: int, begin: int, size: int) -> PromptPiece | None:
        """Return the chunk's tokens that are not scored yet, or None if there are none."""
        first, end = max(self._next, begin + 1), min(begin + size + 1, len(self._prompt))
        if first >= end:
            return None
        tokens = np.array(self._prompt[first:end], np.int64)
        return PromptPiece(chunk, first - 1 - begin, self._prompt[:first], tokens, self._top_logprobs, self._named)

    def keep(self, scores: Scores) -> None:
        self._parts.append(scores)
        self._next += scores.logprobs.size

    def whole(self, last: Scores | None) -> PromptScores:
        """Return the scores of the whole prompt: all kept scores, followed by `last` unless it is None."""
        parts = [*self._parts, *([] if last is None else [last])]
        logprobs, ranks, ids, values = (np.concatenate(each) for each in zip(*parts, strict=True))
        return PromptScores(
            self.request_id,
            self._first,
            len(self._prompt),
            np.array(self._prompt[self._first :], np.uint32),
            np.maximum(logprobs, LEAST).astype(np.float32),
            ranks.astype(np.uint32),
            ids.astype(np.uint32),
            np.maximum(values, LEAST).astype(np.float32),
            are_named=bool(self._named.size),
        )


def check_scoring(generate: Generate, vocabulary_size: int, most: int) -> None:
    """Raise ValueError if the request's prompt scoring exceeds the engine's limits."""
    asked = generate.prompt_scoring
    if asked.top_logprobs > most:
        raise ValueError(f"prompt_scoring.top_logprobs: at most {most}, got {asked.top_logprobs}")
    check_ids("prompt_scoring.token_ids", asked.token_ids, vocabulary_size)


def scored(logits: Logits, piece: PromptPiece) -> Scores:
    """Compute the scores of a piece in double precision from logits of shape [tokens, vocabulary]."""
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    own = np.take_along_axis(values, piece.tokens[:, None], 1)
    ranks = 1 + (values > own).sum(axis=1)
    if piece.named.size:
        ids = np.broadcast_to(piece.named, (len(values), piece.named.size))
    else:
        # Values that are equal in float32, the precision of the message, stay in the order of their ids.
        ids = np.argsort(-values.astype(np.float32), axis=1, kind="stable")[:, : piece.top_logprobs]
    return Scores(own[:, 0], ranks, ids, np.take_along_axis(values, ids, 1))
