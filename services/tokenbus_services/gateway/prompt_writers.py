"""Writers of what an answer has of its prompt: the echo's part of the logprobs, and `prompt_logprobs`."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import orjson

from tokenbus_contracts import PromptScores
from tokenbus_services.gateway.vocabulary import Tables, Vocabulary

Texts = Mapping[int, bytes] | None
_NUMPY = orjson.OPT_SERIALIZE_NUMPY


def echoed_lists(
    prompt: Sequence[int], scores: PromptScores, vocabulary: Vocabulary, tables: Tables
) -> tuple[bytes, bytes, bytes, bytes]:
    """Return the elements of the four lists that completions have, for a prompt's tokens; nothing is said of the first.

    As for other tokens, the token itself is among its alternatives.
    """
    names = [tables.texts[token_id] for token_id in prompt]
    logprobs = numbers_of(scores.logprobs)
    tops = [
        _object(dict(zip(map(tables.texts.__getitem__, ids), values, strict=True)) | {name: own})
        for name, own, ids, values in zip(
            names[1:],
            logprobs,
            scores.alternative_token_ids.tolist(),
            lines_of(scores.alternative_logprobs),
            strict=True,
        )
    ]
    offsets = accumulate(map(vocabulary.characters.__getitem__, prompt[:-1]), initial=0)
    return (
        b",".join(names),
        b",".join([b"null", *logprobs]),
        b",".join([b"null", *tops]),
        b",".join(b"%d" % offset for offset in offsets),
    )


def characters_of(prompt: Sequence[int], vocabulary: Vocabulary) -> int:
    """Return how many characters begin in a prompt's tokens."""
    return sum(map(vocabulary.characters.__getitem__, prompt))


def prompt_logprobs(scores: PromptScores, vocabulary: Vocabulary) -> bytes:
    """Return `prompt_logprobs` as vLLM has it: null for what is not scored, else by token id logprob, rank and text."""
    values = lines_of(scores.alternative_logprobs)
    entries = [b"null"] * scores.position
    for place, (token_id, own, rank) in enumerate(
        zip(scores.token_ids.tolist(), numbers_of(scores.logprobs), scores.ranks.tolist(), strict=True)
    ):
        others = zip(scores.alternative_token_ids[place].tolist(), values[place], strict=True)
        ranked: dict[int, tuple[bytes, int | None]] = {token_id: (own, rank)}
        for number, (other, logprob) in enumerate(others, 1):
            ranked.setdefault(other, (logprob, None if scores.are_named else number))
        entries.append(
            b"{%b}"
            % b",".join(
                b'"%d":{"logprob":%b,"rank":%b,"decoded_token":%b}'
                % (each, logprob, orjson.dumps(number), vocabulary.texts[each])
                for each, (logprob, number) in ranked.items()
            )
        )
    return b"[%b]" % b",".join(entries)


def prompt_triples(scores: PromptScores, prompt: Sequence[int], texts: Texts) -> bytes:
    """Return what SGLang's `meta_info` has of a prompt, from the token before the first that is scored."""
    logprobs = [b"null", *numbers_of(scores.logprobs)]
    own = triples(zip(prompt[scores.position - 1 :], logprobs, strict=True), texts)
    if not scores.alternative_logprobs.shape[1]:
        return b'"input_token_logprobs":' + own
    lines = zip(scores.alternative_token_ids.tolist(), lines_of(scores.alternative_logprobs), strict=True)
    others = b",".join([b"null", *(triples(zip(*line, strict=True), texts) for line in lines)])
    name = b"token_ids" if scores.are_named else b"top"
    return b'"input_token_logprobs":%b,"input_%b_logprobs":[%b]' % (own, name, others)


def triples(tokens: Iterable[tuple[int, bytes]], texts: Texts) -> bytes:
    """Return SGLang's list of tokens with their logprobs: logprob, id and text, which is null without texts."""
    listed = [
        b"[%b,%d,%b]" % (logprob, token_id, b"null" if texts is None else texts[token_id])
        for token_id, logprob in tokens
    ]
    return b"[%b]" % b",".join(listed)


def _object(members: dict[bytes, bytes]) -> bytes:
    return b"{%b}" % b",".join(b"%b:%b" % member for member in members.items())


def numbers_of(values: npt.NDArray[np.float32]) -> list[bytes]:
    """Return numbers as JSON: the shortest decimals that are the same float32."""
    return orjson.dumps(np.ascontiguousarray(values), option=_NUMPY)[1:-1].split(b",") if values.size else []


def lines_of(values: npt.NDArray[np.float32]) -> list[list[bytes]]:
    """Return those of each line of an array."""
    written = numbers_of(values.ravel())
    width = values.shape[1]
    return (
        [written[begin:end] for begin, end in pairwise(range(0, len(written) + 1, width))]
        if width
        else [[]] * len(values)
    )
