"""Envelope: the JSON around an answer's choices, as OpenAI's completions or chats, or vLLM's tokens, have it."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from tokenbus.gateway.answer import Beside, Choice, Format
from tokenbus.gateway.buffers import Collected, collect
from tokenbus.gateway.completion_request import CompletionRequest, Ending
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.event_writer import EventForm, EventStream
from tokenbus.gateway.logprob_writers import (
    Columns,
    Drafted,
    Entries,
    IdEntries,
    Lists,
    Nothing,
    Part,
    Piece,
    TokenExtras,
    TokenIds,
    Written,
    prompt_logprobs,
)
from tokenbus.gateway.native import Form
from tokenbus.gateway.sse import event, history_of
from tokenbus.gateway.tool_calls import call_writer
from tokenbus.gateway.vocabulary import Vocabulary
from tokenbus_contracts import PromptScores

DONE = b"data: [DONE]\n\n"
_NO_END = b'"finish_reason":null,"stop_reason":null'
_NULLS_OF_ANSWER = (
    b',"service_tier":null,"system_fingerprint":null,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null'
)
_NULLS_OF_MESSAGE = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
_NULLS_OF_USAGE = dict.fromkeys(("prompt_tokens_details", "completion_tokens_details"))
_NULLS_OF_PROMPT = dict.fromkeys(("created_cache_tokens", "multimodal_tokens"))
"""Fields of vLLM's answers that the gateway never fills. OpenAI's client lacks attributes for unsent fields."""


class Envelope(Format):
    """Writes one answer; what is the same in all of its chunks is encoded once."""

    _nulls_of_answer = _NULLS_OF_ANSWER

    def __init__(self, request: CompletionRequest, key: int) -> None:
        self._request = request
        self._head = orjson.dumps(self._first_members(request.name or f"{key:016x}"))[:-1]
        self._prompt_logprobs: dict[int, Collected] = {}
        self._opening = b"data: " + self._head + b',"choices":[{"index":%d,'
        self._openings = [self._opening % index for index in range(request.choices)]
        self._said = self._member_of_text()
        usage_later = b',"usage":null' if request.wants_usage else b""
        self._no_ids = self._nulls_of_chunk()
        self._going_on = b"," + _NO_END + self._no_ids + b"}]%b}\n\n" % usage_later
        has_ids_to_say = request.wants_ids and request.is_streamed and not self._has_one_prompt
        self._unsaid = set(range(request.choices)) if has_ids_to_say else set()
        """The choices whose first chunk, which has the prompt's ids, is not written yet."""
        self._call_writers = [each for _ in range(request.choices) if (each := call_writer(request)) is not None]

    @property
    def _has_one_prompt(self) -> bool:
        """Whether what is said of the prompt stands beside the choices, and logprobs are a list of objects."""
        return self._request.is_chat

    def _first_members(self, name: str) -> dict[str, object]:
        request = self._request
        kind = ("chat.completion", "chat.completion.chunk") if request.is_chat else ("text_completion",) * 2
        return {
            "id": f"{'chatcmpl' if request.is_chat else 'cmpl'}-{name}",
            "object": kind[request.is_streamed],
            "created": int(time.time()),
            "model": request.model,
        }

    def _nulls_of_chunk(self) -> bytes:
        """Return the members of a chunk that are about ids and have none."""
        no_ids = b"" if self._request.wants_ids else b',"token_ids":null'
        return no_ids if self._has_one_prompt else no_ids + b',"prompt_token_ids":null'

    def _member_of_text(self) -> bytes:
        """Return what a chunk has of a text; empty: nothing."""
        return b'"delta":{"content":%b},' if self._request.is_chat else b'"text":%b,'

    def stream(self, index: int) -> EventStream:
        """Return a choice that nothing was written of; its rows are for Python if they need more than their columns."""
        request = self._request
        stopping = request.stopping
        is_plain = request.is_streamed and not (self._call_writers or stopping.texts or stopping.shows_special)
        needs_python = request.names_ids or request.wants_running_usage or request.echoes or request.token_scoring
        if not (is_plain and self._said) or needs_python or request.wants_columns or request.wants_drafts:
            return EventStream()
        before, behind = self._said.split(b"%b")
        form = Form.NONE
        if request.top_logprobs is None:
            behind += b'"logprobs":null'
        else:
            form = Form.CONTENT if self._has_one_prompt else Form.LISTS if request.top_logprobs else Form.OWN
        stream = EventStream(EventForm(self._openings[index] + before, behind, self._going_on, form, request.wants_ids))
        stream.is_held = index in self._unsaid
        return stream

    def scored(self, index: int, scores: PromptScores, vocabulary: Vocabulary) -> Iterator[int]:
        """Write the scores of a choice's prompt for `prompt_logprobs`; yield what memory each part took, in bytes."""
        if self._has_one_prompt and index:
            return
        written = self._prompt_logprobs[index] = Collected()
        for part in prompt_logprobs(scores, vocabulary):
            collect([written], [part])
            yield written.grown()

    def drop(self) -> None:
        """Free the scores of prompts that were written."""
        self._prompt_logprobs.clear()

    def parts(self, progress: EventStream) -> tuple[Part, ...]:
        """Return new writers of the members beside a choice's text."""
        request = self._request
        has_logprobs, are_given = request.top_logprobs is not None, request.names_alternatives
        if has_logprobs and not request.wants_columns:
            parts = [self._logprobs(progress, b'"logprobs":', are_given=are_given)]
        else:
            parts = [Nothing(b'"logprobs":')]
        if request.wants_ids:
            parts.append(TokenIds())
        if request.token_scoring.keys() - {"token_ids" if are_given else ""}:
            parts.append(TokenExtras())
        if request.wants_columns:
            parts.append(Columns())
        if request.wants_drafts:
            name = b'"draft_columns":' if request.wants_columns else b'"draft_logprobs":'
            part = Columns(name) if request.wants_columns else self._logprobs(EventStream(), name, are_given=False)
            parts.append(Drafted(part))
        return tuple(parts)

    def _logprobs(self, progress: EventStream, name: bytes, *, are_given: bool) -> Part:
        request = self._request
        if self._has_one_prompt:
            return Entries(name, names_ids=request.names_ids, are_given=are_given)
        return Lists(
            progress,
            name,
            has_alternatives=bool(request.top_logprobs),
            shows_special=request.stopping.shows_special,
            names_ids=request.names_ids,
            are_given=are_given,
        )

    # Streamed.

    def beginnings(self) -> bytes:
        """Return the chunks before all rows: in chats each choice's role, and the prompt's ids if requested."""
        if not self._request.is_chat:
            return b""
        said = b'"delta":{"role":"assistant","content":""},"logprobs":null,' + _NO_END
        chunks = []
        for index, opening in enumerate(self._openings):
            beside = self._prompt_ids(index) + self._usage_so_far(index, 0)
            chunks.append(opening + said + b"}]%b}\n\n" % beside)
        return b"".join(chunks)

    def chunk(self, choice: Choice, text: str, pieces: Sequence[Piece]) -> bytes:
        """Return a row's chunk; none for a text that only begins a call, where nothing else is to be said."""
        index, end = choice.index, choice.ending
        said = self._said and self._said % orjson.dumps(text)
        if self._call_writers:
            delta = self._call_writers[index].delta(text, is_last=end is not None)
            if delta == b"{}" and end is None and choice.is_silent:
                return b""
            said = b'"delta":%b,' % delta
        beside = b",".join([part.name + part.joined(piece) for part, piece in zip(choice.parts, pieces, strict=True)])
        ending, is_first = self._going_on, index in self._unsaid
        if is_first or end is not None or self._request.wants_running_usage:
            self._unsaid.discard(index)
            why = _NO_END if end is None else self._ending(index, end)
            ids = self._prompt_ids(index) if is_first else self._no_ids
            ending = b",%b%b}]%b}\n\n" % (why, ids, self._usage_so_far(index, choice.tokens))
        return b"".join((self._openings[index], said, beside, ending))

    def last(self, tokens: int, cached: int | None) -> bytes:
        """Return the end of the stream, after all rows."""
        if not self._request.wants_usage:
            return DONE
        usage = self._usage(self._request.prompt_tokens, tokens, cached)
        return b"data: " + self._head + b',"choices":[],"usage":%b}\n\n' % usage + DONE

    def error(self, error: ApiError) -> bytes:
        """Return the event of an error."""
        return event("error", error.body)

    # Whole.

    def whole(self, choices: Iterable[Iterable[Written]], tokens: int, cached: int | None) -> Iterator[Written]:
        """Yield the whole answer; `choices` are from `choice`."""
        yield self._head + b',"choices":['
        for number, choice in enumerate(choices):
            yield from ((b",",) if number else ())
            yield from choice
        yield b'],"usage":' + self._usage(self._request.prompt_tokens, tokens, cached)
        if self._has_one_prompt:
            yield from self._of_prompt(0)
        yield self._nulls_of_answer + (b',"prompt_text":null}' if self._request.is_chat else b"}")

    def choice(self, index: int, text: str, beside: Beside, end: Ending | None) -> Iterator[Written]:
        """Yield a whole choice."""
        said = self._said and self._said % orjson.dumps(text)
        if self._request.is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": text, **_NULLS_OF_MESSAGE}
            called = self._call_writers[index].message(text) if self._call_writers else {}
            said = b'"message":%b,' % orjson.dumps(message | called)
        yield b'{"index":%d,' % index + said
        for name, value in beside:
            yield name
            yield from value
            yield b","
        yield self._ending(index, end) + (b"" if self._request.wants_ids else b',"token_ids":null')
        if not self._has_one_prompt:
            yield from self._of_prompt(index)
        yield b"}"

    @property
    def held(self) -> int:
        """How many characters of a stream are held back, as they may be a call."""
        return sum(each.held for each in self._call_writers)

    def _ending(self, index: int, end: Ending | None) -> bytes:
        """Return why a choice ended, and by which of the request's own stops, as vLLM's API has it."""
        reason, stop, spans, turns = end or (None, None, (), ())
        if reason == "stop" and self._call_writers and self._call_writers[index].is_called:
            reason = "tool_calls"
        ending = b'"finish_reason":%b,"stop_reason":%b' % (orjson.dumps(reason), orjson.dumps(stop))
        history = history_of(spans, turns)
        return ending + b"," + orjson.dumps(history)[1:-1] if history else ending

    def _of_prompt(self, index: int) -> Iterator[Written]:
        """Yield the members of a whole answer that are about a prompt: of a chat they are the answer's."""
        logprobs = self._prompt_logprobs.pop(index, None)
        yield self._prompt_ids(index) + b',"prompt_logprobs":' + (b"null" if logprobs is None else b"[")
        if logprobs is not None:
            yield from logprobs.taken()
            yield b"]"

    def _prompt_ids(self, index: int) -> bytes:
        request = self._request
        is_batch = self._has_one_prompt and len(request.prompts) > 1
        is_hidden = is_batch or request.hides_prompts or not request.wants_ids
        return b',"prompt_token_ids":' + (b"null" if is_hidden else orjson.dumps(list(self._prompt(index))))

    def _prompt(self, index: int) -> Sequence[int]:
        return self._request.prompts[index // self._request.n]

    def _usage_so_far(self, index: int, tokens: int) -> bytes:
        """Return the usage of a chunk that is not the last: of its choice where that is wanted."""
        if self._request.wants_running_usage:
            return b',"usage":' + self._usage(len(self._prompt(index)), tokens)
        return b',"usage":null' if self._request.wants_usage else b""

    @staticmethod
    def _usage(prompt: int, tokens: int, cached: int | None = None) -> bytes:
        usage: dict[str, object] = {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
        }
        details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached, **_NULLS_OF_PROMPT}}
        return orjson.dumps(usage | _NULLS_OF_USAGE | details)


class GenerateFormat(Envelope):
    """Writes one answer of vLLM's /inference/v1/generate: token ids, and the text beside them where that is wanted."""

    _has_one_prompt = True
    _nulls_of_answer = b',"metrics":null,"kv_transfer_params":null,"ec_transfer_params":null'

    def _first_members(self, name: str) -> dict[str, object]:
        request = self._request
        mode = "text" if request.wants_text else "tokens"
        members: dict[str, object] = {"request_id": f"generate-tokens-{name}", "output_mode": mode}
        return members if request.is_streamed else members | {"model": request.model, "created": int(time.time())}

    def _member_of_text(self) -> bytes:
        return b'"text":%b,' if self._request.wants_text else b""

    def parts(self, progress: EventStream) -> tuple[Part, ...]:
        """Return new writers of the members beside a choice's text."""
        parts = super().parts(progress)
        if self._request.wants_text:
            return parts
        are_given = self._request.names_alternatives
        return tuple(IdEntries(are_given=are_given) if isinstance(part, Entries) else part for part in parts)

    def beginnings(self) -> bytes:
        """Return the chunk before all rows, with the prompt's ids if requested."""
        if self._request.hides_prompts:
            return b""
        said = self._said and self._said % b'""'
        ending = b'"token_ids":[],"logprobs":null,%b}]%b%b}\n\n'
        return self._openings[0] + said + ending % (_NO_END, self._prompt_ids(0), self._usage_so_far(0, 0))
