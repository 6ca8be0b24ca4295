"""SglangFormat: an answer as SGLang's /generate has it."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import orjson

from tokenbus_contracts import PromptScores
from tokenbus_services.gateway.answer import ROW_BYTES
from tokenbus_services.gateway.completion_request import CompletionRequest, Ending
from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.gateway.event_writer import EventStream
from tokenbus_services.gateway.logprob_writers import Part, Piece, TokenIds, Triples, size_of
from tokenbus_services.gateway.openai_format import DONE
from tokenbus_services.gateway.prompt_writers import prompt_triples
from tokenbus_services.gateway.sse import versions_of
from tokenbus_services.gateway.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tokenbus_services.gateway.answer import Choice

_IDS = b'"output_ids":'


class SglangFormat:
    """Writes one answer; each chunk of a stream has all that came before it, too."""

    held = 0

    def __init__(self, request: CompletionRequest, key: int) -> None:
        self.kept = 0
        self._request = request
        self._began = time.monotonic()
        self._name = request.name or f"{key:016x}"
        self._of_prompts: dict[int, bytes] = {}
        """By choice, what `meta_info` has of its prompt."""
        self._sent: list[tuple[list[str], list[Sequence[Piece]]]] = [([], []) for _ in range(request.choices)]
        """The texts and the pieces of each choice that a stream has sent."""

    def stream(self, index: int) -> EventStream:  # noqa: ARG002
        """Return a choice whose rows are all for Python."""
        return EventStream()

    def parts(self, progress: EventStream) -> tuple[Part, ...]:  # noqa: ARG002
        """Return new writers of the members beside a choice's text."""
        k = self._request.top_logprobs
        if k is None:
            return (TokenIds(_IDS),)
        return TokenIds(_IDS), Triples(has_alternatives=k > 0, names_texts=self._request.names_texts)

    def scored(self, index: int, scores: PromptScores, vocabulary: Vocabulary) -> int:
        """Take the scores of a choice's prompt; return how many bytes are held of them."""
        texts = vocabulary.texts if self._request.names_texts else None
        written = self._of_prompts[index] = prompt_triples(scores, self._prompt(index), texts)
        return len(written)

    # Streamed.

    def beginnings(self) -> bytes:
        """Return nothing: a stream begins with its first row."""
        return b""

    def chunk(self, choice: "Choice", text: str, pieces: Sequence[Piece]) -> bytes:
        """Return a row's chunk."""
        texts, rows = self._sent[choice.index]
        texts.append(text)
        rows.append(pieces)
        self.kept += ROW_BYTES + len(orjson.dumps(text)) + sum(map(size_of, pieces))
        columns = zip(*rows, strict=True)
        beside = [part.name + part.joined(column) for part, column in zip(choice.parts, columns, strict=True)]
        return b"data: %b\n\n" % self.choice(choice.index, "".join(texts), beside, choice.ending)

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
        request = self._request
        ids = beside[0][len(_IDS) + 1 : -1]
        count = ids.count(b",") + bool(ids)
        facts: dict[str, object] = {
            "id": self._id(index),
            "finish_reason": end and _finish_reason(end, count, ids.rpartition(b",")[2]),
            "prompt_tokens": len(self._prompt(index)),
            "completion_tokens": count,
            "cached_tokens": 0,
        }
        if end is not None:
            spans = versions_of(end.weight_spans)
            facts |= {"weight_versions": spans} if spans else {}
            facts |= {"weight_version": spans[-1]["version"] if spans else "0"}
            facts |= {"e2e_latency": time.monotonic() - self._began}
        members = [orjson.dumps(facts)[1:-1]]
        if len(beside) > 1:
            nothing = b'"input_token_logprobs":[]' + (b',"input_top_logprobs":[]' if request.top_logprobs else b"")
            members += [self._of_prompts.get(index, nothing), beside[1], b'"output_token_logprobs_length":%d' % count]
        place = b',"index":%d' % index if request.is_batch and request.is_streamed else b""
        return b'{"text":%b,%b,"meta_info":{%b}%b}' % (orjson.dumps(text), beside[0], b",".join(members), place)

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
