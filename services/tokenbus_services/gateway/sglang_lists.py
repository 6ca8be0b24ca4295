"""MetaLists: what SGLang's `meta_info` has of each token of an answer."""

from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain

import numpy as np
import orjson

from tokenbus_contracts import Extras, PromptScores, ValueKind
from tokenbus_services.gateway.completion_request import CompletionRequest
from tokenbus_services.gateway.logprob_writers import Piece, ScoredToken, listed, scored_tokens
from tokenbus_services.gateway.prompt_writers import lines_of, numbers_of, triples
from tokenbus_services.gateway.rendered_step import RenderedStep
from tokenbus_services.gateway.vocabulary import Vocabulary

_NULL = b"null"
_LOGPROBS = b"output_token_logprobs"
_TOPS = b"output_top_logprobs"
_GIVEN = b"output_token_ids_logprobs"
_ALSO_OF_PROMPTS = (_LOGPROBS, _TOPS, _GIVEN)
_MASKS, _OF_MASKS = b"output_token_sampling_mask", b"output_token_sampling_logprobs"


class MetaLists:
    """Lists with an element for each token: a token is its logprob, its id, and its text or null."""

    name = b""
    is_empty = False

    def __init__(self, request: CompletionRequest) -> None:
        """Take what is asked for."""
        scoring = request.token_scoring
        gives = "token_ids" in scoring or "token_ids" in (request.prompt_scoring or ())
        has_masks = "mask_bound" in scoring
        wanted = {_LOGPROBS: True, _TOPS: request.top_logprobs, _GIVEN: gives, _MASKS: has_masks, _OF_MASKS: has_masks}
        self.names = [name for name, is_wanted in wanted.items() if is_wanted]
        self.counted = [name for name in self.names if name in (_LOGPROBS, _MASKS)]
        """Those whose lengths are said, too."""
        self._others = _GIVEN if "token_ids" in (request.prompt_scoring or ()) else _TOPS
        """What the alternatives of a prompt's tokens are."""
        self._has_extras = gives or has_masks
        self._names_texts = request.names_texts

    def take(self, view: RenderedStep, place: int, count: int) -> tuple[bytes, ...]:
        """Return the lists' elements of a row's first tokens, with commas between."""
        tokens = scored_tokens(view, place, count)
        extras = view.batch.row(place).extras if self._has_extras else None
        return tuple(b",".join(self._elements(name, view, tokens, extras)) for name in self.names)

    def _elements(
        self, name: bytes, view: RenderedStep, tokens: Sequence[ScoredToken], extras: Extras | None
    ) -> Iterator[bytes]:
        texts, count = view.vocabulary.texts if self._names_texts else None, len(tokens)
        if name == _LOGPROBS:
            yield triples([(each.token_id, each.logprob) for each in tokens], texts)[1:-1]
        elif name == _TOPS:
            yield from (triples(each.others, texts) if each.others else _NULL for each in tokens)
        elif name == _GIVEN and extras is not None and extras.given_token_ids.size:
            ids = extras.given_token_ids.tolist()
            lines = lines_of(extras.given_logprobs[:count])
            yield from (triples(zip(ids, line, strict=True), texts) for line in lines)
        elif name == _MASKS and extras is not None and extras.mask_sizes.size:
            masks = list(extras.masks())[:count]
            yield from (_NULL if mask is None else orjson.dumps(mask.tolist()) for mask in masks)
        elif name == _OF_MASKS and view.batch.header.value_kind == ValueKind.PROCESSED_LOGPROBS:
            yield from (each.logprob for each in tokens)
        elif name == _OF_MASKS and extras is not None and extras.other_logprobs.size:
            yield from numbers_of(extras.other_logprobs[:count])
        else:  # they were dropped on the way
            yield from [_NULL] * count

    def of_prompt(self, parts: Sequence[tuple[bytes, bytes]]) -> bytes:
        """Return the members that are about a prompt, from the parts of its tokens and of their alternatives."""
        own, others = zip(*parts, strict=True) if parts else ((), ())
        lists = {_LOGPROBS: own, self._others: others}
        wanted = [name for name in self.names if name in _ALSO_OF_PROMPTS]
        return b",".join([
            b'"%b":%b' % (name.replace(b"output", b"input"), listed(lists.get(name, ()))) for name in wanted
        ])  # fmt: skip

    def echo(self, prompt: Sequence[int], scores: PromptScores | None, vocabulary: Vocabulary) -> Iterable[Piece]:  # noqa: ARG002
        """Return nothing: the prompt's have members of their own."""
        return ()

    def joined(self, pieces: Sequence[tuple[bytes, ...]]) -> bytes:
        """Return the members, with commas between."""
        columns = zip(*pieces, strict=True) if pieces else [()] * len(self.names)
        return b",".join(
            [b'"%b":%b' % (name, listed(column)) for name, column in zip(self.names, columns, strict=True)]
        )


def top_p_members(lists: Iterable[bytes | bytearray]) -> bytes:
    """Return what slime wants in `meta_info`, of the members that `MetaLists` has written, in parts.

    The ids of all masks, one after the other, and where each begins; nothing where a mask is too large to tell.
    """
    masks = orjson.loads(b"{%b}" % b"".join(lists)).get(_MASKS.decode(), [None])
    if None in masks:
        return b""
    ids, offsets = list(chain.from_iterable(masks)), list(accumulate(map(len, masks), initial=0))
    written = tuple(b2a_base64(np.array(each, "<i4").tobytes(), newline=False) for each in (ids, offsets))
    return b',"top_p_token_ids":"%b","top_p_token_offsets":"%b"' % written
