"""Prompts that are scored: what the model says of each prompt's tokens, kept chunk by chunk as they are computed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus.engines.admission import check_ids
from tokenbus.engines.sampling import Ids, Logits
from tokenbus_contracts import PromptScores
from tokenbus_contracts.generated.request_pb2 import Generate

LEAST = -9999.0
"""What is written for a logprob of minus infinity."""


class PromptPiece(NamedTuple):
    """Some tokens of a prompt, and what the model says of each."""

    place: int
    """Which of the chunks that a step computes they are in."""
    skip: int
    """How many tokens of that chunk come before the one that the first of them follows."""
    context: Sequence[int]
    tokens: Ids
    top_logprobs: int
    named: Ids
    """The tokens whose logprobs are wanted in the place of the most probable."""


class PieceScores(NamedTuple):
    """What the model says of a piece's tokens: a line for each."""

    logprobs: npt.NDArray[np.floating]
    ranks: npt.NDArray[np.integer]
    alternative_token_ids: npt.NDArray[np.integer]
    alternative_logprobs: npt.NDArray[np.floating]


class ScoredPrompt:
    """One prompt, and the scores of its tokens so far."""

    def __init__(self, generate: Generate, prompt: Sequence[int]) -> None:
        asked = generate.prompt_scoring
        self.key = generate.request_id
        self.is_alone = asked.without_generation
        self._prompt = prompt
        self._first = self._next = min(max(1, asked.first_position), len(prompt))
        self._top_logprobs, self._named = asked.top_logprobs, np.array(asked.token_ids, np.int64)
        width = self._named.size or asked.top_logprobs
        nothing = np.zeros((0, width), np.int64)
        self._parts = [PieceScores(np.zeros(0), np.zeros(0, np.int64), nothing, np.zeros((0, width)))]

    def piece(self, place: int, begin: int, size: int) -> PromptPiece | None:
        """Return the tokens that a chunk newly scores, or None."""
        first, end = max(self._next, begin + 1), min(begin + size + 1, len(self._prompt))
        if first >= end:
            return None
        tokens = np.array(self._prompt[first:end], np.int64)
        return PromptPiece(place, first - 1 - begin, self._prompt[:first], tokens, self._top_logprobs, self._named)

    def keep(self, scores: PieceScores) -> None:
        """Keep the scores of the next tokens."""
        self._parts.append(scores)
        self._next += scores.logprobs.size

    def whole(self, last: PieceScores | None) -> PromptScores:
        """Return all scores; `last` has those of the last piece."""
        parts = [*self._parts, *([] if last is None else [last])]
        logprobs, ranks, ids, values = (np.concatenate(each) for each in zip(*parts, strict=True))
        return PromptScores(
            self.key,
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
    """Raise a ValueError for a wish that an engine of that vocabulary, and of so many alternatives, cannot fulfil."""
    asked = generate.prompt_scoring
    if asked.top_logprobs > most:
        raise ValueError(f"prompt_scoring.top_logprobs: at most {most}, got {asked.top_logprobs}")
    check_ids("prompt_scoring.token_ids", asked.token_ids, vocabulary_size)


def scored(logits: Logits, piece: PromptPiece) -> PieceScores:
    """Return what logits, a line for each token of a piece, say of them; in double precision."""
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    own = np.take_along_axis(values, piece.tokens[:, None], 1)
    ranks = 1 + (values > own).sum(axis=1)
    if piece.named.size:
        ids = np.broadcast_to(piece.named, (len(values), piece.named.size))
    else:
        # As they are written, ties by the lower id.
        ids = np.argsort(-values.astype(np.float32), axis=1, kind="stable")[:, : piece.top_logprobs]
    return PieceScores(own[:, 0], ranks, ids, np.take_along_axis(values, ids, 1))
