"""SglangFormat: an answer as SGLang's /generate has it."""

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import orjson

from tokenbus_contracts import PromptScores
from tokenbus_services.gateway.completion_request import CompletionRequest, Ending
from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.gateway.event_writer import EventStream
from tokenbus_services.gateway.logprob_writers import Part, Piece, TokenIds
from tokenbus_services.gateway.openai_format import DONE
from tokenbus_services.gateway.prompt_writers import prompt_triples
from tokenbus_services.gateway.sglang_lists import MetaLists, top_p_members
from tokenbus_services.gateway.sse import versions_of
from tokenbus_services.gateway.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tokenbus_services.gateway.answer import Choice

_IDS = b'"output_ids":'


class _Sent:
    """What a stream has sent of a choice, as JSON without what is around it: each row is written once."""

    def __init__(self, lists: int) -> None:
        self.text = bytearray()
        self.ids = bytearray()
        self.lists = [bytearray() for _ in range(lists)]
        self.last = b""
        """The last token's id."""
        self.tokens = 0
        """How many tokens the last chunk had."""
        self.size = 0
        """How many bytes it has."""

    def add(self, text: str, ids: bytes, lists: Sequence[bytes]) -> None:
        """Add a row."""
        said = orjson.dumps(text)[1:-1]
        self.text += said
        self.last = ids.rpartition(b",")[2] or self.last
        self.size += len(said)
        for all_, new in zip((self.ids, *self.lists), (ids, *lists), strict=True):
            if new:
                all_.extend(b"," + new if all_ else new)
                self.size += len(new) + 1

    def clear(self) -> None:
        """Begin anew."""
        self.size = 0
        for each in (self.text, self.ids, *self.lists):
            each.clear()


class SglangFormat:
    """Writes one answer; a chunk of a stream has all that came before it, too, unless the settings say otherwise."""

    held = 0

    def __init__(self, request: CompletionRequest, key: int) -> None:
        self.kept = 0
        self._request = request
        self._began = time.monotonic()
        self._name = request.name or f"{key:016x}"
        self._of_prompts: dict[int, list[tuple[bytes, bytes]]] = {}
        """By choice, what `meta_info` has of its prompt's tokens and of their alternatives."""
        self._lists = None if request.top_logprobs is None else MetaLists(request)
        self._sent = [_Sent(len(self._lists.names) if self._lists else 0) for _ in range(request.choices)]

    def stream(self, index: int) -> EventStream:  # noqa: ARG002
        """Return a choice whose rows are all for Python."""
        return EventStream()

    def parts(self, progress: EventStream) -> tuple[Part, ...]:  # noqa: ARG002
        """Return new writers of the members beside a choice's text."""
        return (TokenIds(_IDS),) if self._lists is None else (TokenIds(_IDS), self._lists)

    def scored(self, index: int, scores: PromptScores, vocabulary: Vocabulary) -> Iterator[int]:
        """Write the scores of a choice's prompt, a part at each turn; yield its bytes."""
        texts = vocabulary.texts if self._request.names_texts else None
        written = self._of_prompts[index] = []
        for part in prompt_triples(scores, self._prompt(index), texts):
            written.append(part)
            yield sum(map(len, part))

    # Streamed.

    def beginnings(self) -> bytes:
        """Return nothing: a stream begins with its first row."""
        return b""

    def chunk(self, choice: "Choice", text: str, pieces: Sequence[Piece]) -> bytes:
        """Return a row's chunk; none before `stream_interval` tokens have come."""
        request, sent, end = self._request, self._sent[choice.index], choice.ending
        ids, *rest = pieces
        sent.add(text, ids, rest[0] if rest else ())  # type: ignore[arg-type]  # as its parts have them
        waits = end is None and sent.tokens and choice.tokens - sent.tokens < request.stream_interval
        if waits or not request.is_incremental:
            self.kept = max(self.kept, sum([each.size for each in self._sent]))
        if waits:
            return b""
        sent.tokens = choice.tokens
        lists: list[bytes | bytearray] = []
        for name, elements in zip(self._lists.names if self._lists else (), sent.lists, strict=True):
            lists += (b"," if lists else b"", b'"', name, b'":[', elements, b"]")
        text_and_ids = (b'{"text":"', sent.text, b'","output_ids":[', sent.ids, b"]")
        behind = self._behind(choice.index, lists, choice.tokens, sent.last, end)
        written = b"".join((b"data: ", *text_and_ids, *behind, b"\n\n"))
        if request.is_incremental:
            sent.clear()
        return written

    def last(self, tokens: int) -> bytes:  # noqa: ARG002
        """Return the end of the stream, after all rows."""
        return DONE

    def error(self, error: ApiError) -> bytes:
        """Return the chunk of an error, which ends the stream."""
        return b"data: %b\n\n" % orjson.dumps(error.body) + DONE

    # Whole.

    def whole(self, choices: Sequence[bytes], tokens: int) -> bytes:  # noqa: ARG002
        """Return the whole answer; `choices` are from `choice`."""
        return b"[%b]" % b",".join(choices) if self._request.is_batch else choices[0]

    def choice(self, index: int, text: str, beside: Sequence[bytes], end: Ending | None) -> bytes:
        """Return an answer to one prompt."""
        ids = beside[0][len(_IDS) + 1 : -1]
        behind = self._behind(index, beside[1:], ids.count(b",") + bool(ids), ids.rpartition(b",")[2], end)
        return b"".join((b'{"text":', orjson.dumps(text), b",", beside[0], *behind))

    def _behind(
        self, index: int, lists: Sequence[bytes | bytearray], count: int, last: bytes, end: Ending | None
    ) -> Iterable[bytes | bytearray]:
        """Return what stands behind the text and the ids, in parts: `lists` together are members of `meta_info`."""
        request = self._request
        facts: dict[str, object] = {
            "id": self._id(index),
            "finish_reason": end and _finish_reason(end, count, last),
            "prompt_tokens": len(self._prompt(index)),
            "completion_tokens": count,
            "cached_tokens": 0,
        }
        if end is not None:
            spans = versions_of(end.weight_spans)
            facts |= {"weight_versions": spans} if spans else {}
            facts |= {"weight_version": spans[-1]["version"] if spans else "0"}
            facts |= {"e2e_latency": time.monotonic() - self._began}
        before = b',"meta_info":{' + orjson.dumps(facts)[1:-1]
        place = b'},"index":%d}' % index if request.is_batch and request.is_streamed else b"}}"
        if self._lists is None:
            return before, place
        prompt = self._lists.of_prompt(self._of_prompts.get(index, ()))
        lengths = b"".join(b',"%b_length":%d' % (name, count) for name in self._lists.counted)
        has_top_p = request.wants_top_p and (end is not None or request.is_incremental)
        top_p = top_p_members(lists) if has_top_p else b""
        return chain((before, b",", prompt, b","), lists, (lengths, top_p, place))

    def _prompt(self, index: int) -> Sequence[int]:
        return self._request.prompts[index // self._request.n]

    def _id(self, index: int) -> str:
        request = self._request
        names = request.echoed["rids"]
        if names:
            return f"{names[index // request.n]}_{index % request.n}" if request.n > 1 else names[index]
        return f"{self._name}_{index}" if request.is_batch else self._name


def _finish_reason(end: Ending, count: int, last: bytes) -> dict[str, object]:
    if end.reason == "length":
        return {"type": "length", "length": count}
    if end.reason == "abort":
        return {"type": "abort", "message": "Aborted"}
    # The model's own end is its last token.
    return {"type": "stop", "matched": int(last) if end.stop is None and last else end.stop}
