"""Writers of what an answer has of its prompt: the echo's part of the logprobs, and `prompt_logprobs`."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import orjson

from tokenbus.gateway.vocabulary import Tables, Vocabulary
from tokenbus_contracts import PromptScores

_NUMPY = orjson.OPT_SERIALIZE_NUMPY
_MOST_VALUES = 4096
"""That are written at once: other tasks of the event loop run between."""
_OF_POSITION = 4
"""As many values a position costs beside its alternatives."""


def echoed_lists(
    prompt: Sequence[int], scores: PromptScores, vocabulary: Vocabulary, tables: Tables
) -> Iterator[tuple[bytes, ...]]:
    """Yield the elements of the four lists that completions have, part after part of a prompt's tokens.

    Nothing is said of the first token. As for other tokens, the token itself is among its alternatives.
    """
    texts = tables.texts
    yield texts[prompt[0]], b"null", b"null", b"0"
    characters = vocabulary.characters
    offset = characters[prompt[0]]
    for part in _parts(scores):
        ids = scores.token_ids[part].tolist()
        names, logprobs = [texts[token_id] for token_id in ids], _numbers_of(scores.logprobs[part])
        lines = zip(
            scores.alternative_token_ids[part].tolist(), _lines_of(scores.alternative_logprobs[part]), strict=True
        )
        tops = [
            _object(dict(zip(map(texts.__getitem__, others), values, strict=True)) | {name: own})
            for name, own, (others, values) in zip(names, logprobs, lines, strict=True)
        ]
        *offsets, offset = accumulate(map(characters.__getitem__, ids), initial=offset)
        yield b",".join(names), b",".join(logprobs), b",".join(tops), b",".join([b"%d" % each for each in offsets])


def characters_of(prompt: Sequence[int], vocabulary: Vocabulary) -> int:
    """Return how many characters begin in a prompt's tokens."""
    return sum(map(vocabulary.characters.__getitem__, prompt))


def prompt_logprobs(scores: PromptScores, vocabulary: Vocabulary) -> Iterator[bytes]:
    """Yield the elements of `prompt_logprobs` as vLLM has it, part after part of a prompt's tokens.

    Null for what is not scored, else by token id logprob, rank and text.
    """
    yield b",".join([b"null"] * scores.position)
    for part in _parts(scores):
        others, values = scores.alternative_token_ids[part].tolist(), _lines_of(scores.alternative_logprobs[part])
        tokens = zip(
            scores.token_ids[part].tolist(), _numbers_of(scores.logprobs[part]), scores.ranks[part].tolist(),
            others, values, strict=True,
        )  # fmt: skip
        yield b",".join([_ranked(vocabulary, *token, are_named=scores.are_named) for token in tokens])


def _ranked(  # noqa: PLR0913, PLR0917 - what is known of one position
    vocabulary: Vocabulary,
    token_id: int,
    own: bytes,
    rank: int,
    others: Sequence[int],
    values: Sequence[bytes],
    *,
    are_named: bool,
) -> bytes:
    ranked: dict[int, tuple[bytes, int | None]] = {token_id: (own, rank)}
    for number, (other, logprob) in enumerate(zip(others, values, strict=True), 1):
        ranked.setdefault(other, (logprob, None if are_named else number))
    return b"{%b}" % b",".join([
        b'"%d":{"logprob":%b,"rank":%b,"decoded_token":%b}'
        % (each, logprob, orjson.dumps(number), vocabulary.texts[each])
        for each, (logprob, number) in ranked.items()
    ])  # fmt: skip


def _parts(scores: PromptScores) -> Iterator[slice]:
    """Yield slices of the positions of which some milliseconds' worth is written."""
    at_once = max(1, _MOST_VALUES // (_OF_POSITION + scores.alternative_logprobs.shape[1]))
    for begin in range(0, scores.token_ids.size, at_once):
        yield slice(begin, begin + at_once)


def _object(members: dict[bytes, bytes]) -> bytes:
    return b"{%b}" % b",".join(b"%b:%b" % member for member in members.items())


def _numbers_of(values: npt.NDArray[np.float32]) -> list[bytes]:
    """Return numbers as JSON: the shortest decimals that are the same float32."""
    return orjson.dumps(np.ascontiguousarray(values), option=_NUMPY)[1:-1].split(b",") if values.size else []


def _lines_of(values: npt.NDArray[np.float32]) -> list[list[bytes]]:
    written = _numbers_of(values.ravel())
    width = values.shape[1]
    return (
        [written[begin:end] for begin, end in pairwise(range(0, len(written) + 1, width))]
        if width
        else [[]] * len(values)
    )
