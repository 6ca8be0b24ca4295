"""Envelope: answers of OpenAI's completions and chats, and of vLLM's generate."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from tokenbus.gateway import logprob_writers
from tokenbus.gateway.answer import Beside, Choice, Format
from tokenbus.gateway.buffers import Collected, collect
from tokenbus.gateway.completion_request import CompletionRequest, Ending
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.event_writer import EventForm, EventStream
from tokenbus.gateway.logprob_writers import MemberWriter, Piece, Written, prompt_logprobs
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
"""Fields that are null but present as in vLLM's answers. OpenAI's client has no attribute for an absent field."""


class Envelope(Format):
    """Writes one answer. The bytes that all chunks of the answer share are encoded once."""

    _nulls_of_answer = _NULLS_OF_ANSWER

    def __init__(self, request: CompletionRequest, request_id: int) -> None:
        self._request = request
        self._head = orjson.dumps(self._first_members(request.name or f"{request_id:016x}"))[:-1]
        self._prompt_logprobs: dict[int, Collected] = {}
        opening = b"data: " + self._head + b',"choices":[{"index":%d,'
        self._openings = [opening % index for index in range(request.choices)]
        self._text_member = self._member_of_text()
        usage_later = b',"usage":null' if request.wants_usage else b""
        self._no_ids = b"" if request.wants_ids else b',"token_ids":null'
        self._no_ids += b"" if self._has_one_prompt else b',"prompt_token_ids":null'
        self._going_on = b"," + _NO_END + self._no_ids + b"}]%b}\n\n" % usage_later
        shows_prompt_ids = request.wants_ids and request.is_streamed and not self._has_one_prompt
        self._unbegun = set(range(request.choices)) if shows_prompt_ids else set()
        """Indexes of the choices whose first chunk, with the ids of the prompt, is not yet written."""
        calls = (call_writer(request.forced, request.auto) for _ in range(request.choices))
        self._call_writers = [each for each in calls if each is not None]

    @property
    def _has_one_prompt(self) -> bool:
        """Whether the answer is a chat's, with one prompt for all choices and with logprobs as a list of objects."""
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

    def _member_of_text(self) -> bytes:
        return b'"delta":{"content":%b},' if self._request.is_chat else b'"text":%b,'

    def stream(self, index: int) -> EventStream:
        request = self._request
        stopping = request.stopping
        is_plain = request.is_streamed and not (self._call_writers or stopping.texts or stopping.shows_special)
        needs_python = request.names_ids or request.wants_running_usage or request.echoes or request.token_scoring
        if not (is_plain and self._text_member) or needs_python or request.wants_columns or request.wants_drafts:
            return EventStream()
        before, behind = self._text_member.split(b"%b")
        form = Form.NONE
        if request.top_logprobs is None:
            behind += b'"logprobs":null'
        else:
            form = Form.CONTENT if self._has_one_prompt else Form.LISTS if request.top_logprobs else Form.OWN
        stream = EventStream(EventForm(self._openings[index] + before, behind, self._going_on, form, request.wants_ids))
        stream.is_held = index in self._unbegun
        return stream

    def scored(self, index: int, scores: PromptScores, vocabulary: Vocabulary) -> Iterator[int]:
        if self._has_one_prompt and index:
            return
        written = self._prompt_logprobs[index] = Collected()
        for part in prompt_logprobs(scores, vocabulary):
            collect([written], [part])
            yield written.grown()

    def drop(self) -> None:
        self._prompt_logprobs.clear()

    def writers(self, progress: EventStream) -> tuple[MemberWriter, ...]:
        request = self._request
        has_logprobs, are_given = request.top_logprobs is not None, request.names_alternatives
        writers: list[MemberWriter] = [logprob_writers.NoLogprobs()]
        if has_logprobs and not request.wants_columns:
            writers = [self._logprobs(progress, b'"logprobs":', are_given=are_given)]
        if request.wants_ids:
            writers.append(logprob_writers.TokenIds())
        if request.token_scoring.keys() - {"token_ids" if are_given else ""}:
            writers.append(logprob_writers.TokenExtras())
        if request.wants_columns:
            writers.append(logprob_writers.Columns())
        if request.wants_drafts and request.wants_columns:
            writers.append(logprob_writers.Drafted(logprob_writers.Columns(b'"draft_columns":')))
        elif request.wants_drafts:
            drafts = self._logprobs(EventStream(), b'"draft_logprobs":', are_given=False)
            writers.append(logprob_writers.Drafted(drafts))
        return tuple(writers)

    def _logprobs(self, progress: EventStream, name: bytes, *, are_given: bool) -> MemberWriter:
        request = self._request
        if self._has_one_prompt:
            return logprob_writers.Entries(name, names_ids=request.names_ids, are_given=are_given)
        return logprob_writers.Lists(
            progress,
            name,
            has_alternatives=bool(request.top_logprobs),
            shows_special=request.stopping.shows_special,
            names_ids=request.names_ids,
            are_given=are_given,
        )

    def beginnings(self) -> bytes:
        if not self._request.is_chat:
            return b""
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,' + _NO_END
        chunks = []
        for index, opening in enumerate(self._openings):
            beside = self._prompt_ids(index) + self._usage_so_far(index, 0)
            chunks.append(opening + delta + b"}]%b}\n\n" % beside)
        return b"".join(chunks)

    def chunk(self, choice: Choice, text: str, pieces: Sequence[Piece]) -> bytes:
        """Return the chunk of a row, or empty bytes if the row only begins a call."""
        index, end = choice.index, choice.ending
        written_text = self._text_member and self._text_member % orjson.dumps(text)
        if self._call_writers:
            delta = self._call_writers[index].delta(text, is_last=end is not None)
            if delta == b"{}" and end is None and choice.is_silent:
                return b""
            written_text = b'"delta":%b,' % delta
        written = zip(choice.writers, pieces, strict=True)
        beside = b",".join([writer.name + writer.joined(piece) for writer, piece in written])
        ending, is_first = self._going_on, index in self._unbegun
        if is_first or end is not None or self._request.wants_running_usage:
            self._unbegun.discard(index)
            why = _NO_END if end is None else self._ending(index, end)
            ids = self._prompt_ids(index) if is_first else self._no_ids
            ending = b",%b%b}]%b}\n\n" % (why, ids, self._usage_so_far(index, choice.tokens))
        return b"".join((self._openings[index], written_text, beside, ending))

    def last(self, tokens: int, cached: int | None) -> bytes:
        if not self._request.wants_usage:
            return DONE
        usage = self._usage(self._request.prompt_tokens, tokens, cached)
        return b"data: " + self._head + b',"choices":[],"usage":%b}\n\n' % usage + DONE

    def error(self, error: ApiError) -> bytes:
        return event("error", error.body)

    def whole(self, choices: Iterable[Iterable[Written]], tokens: int, cached: int | None) -> Iterator[Written]:
        yield self._head + b',"choices":['
        for number, choice in enumerate(choices):
            yield from ((b",",) if number else ())
            yield from choice
        yield b'],"usage":' + self._usage(self._request.prompt_tokens, tokens, cached)
        if self._has_one_prompt:
            yield from self._of_prompt(0)
        yield self._nulls_of_answer + (b',"prompt_text":null}' if self._request.is_chat else b"}")

    def choice(self, index: int, text: str, beside: Beside, end: Ending | None) -> Iterator[Written]:
        written_text = self._text_member and self._text_member % orjson.dumps(text)
        if self._request.is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": text, **_NULLS_OF_MESSAGE}
            called = self._call_writers[index].message(text) if self._call_writers else {}
            written_text = b'"message":%b,' % orjson.dumps(message | called)
        yield b'{"index":%d,' % index + written_text
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
        return sum(each.held for each in self._call_writers)

    def _ending(self, index: int, end: Ending | None) -> bytes:
        reason, stop, spans, turns = end or (None, None, (), ())
        if reason == "stop" and self._call_writers and self._call_writers[index].is_called:
            reason = "tool_calls"
        ending = b'"finish_reason":%b,"stop_reason":%b' % (orjson.dumps(reason), orjson.dumps(stop))
        history = history_of(spans, turns)
        return ending + b"," + orjson.dumps(history)[1:-1] if history else ending

    def _of_prompt(self, index: int) -> Iterator[Written]:
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
    """Writes one answer of vLLM's /inference/v1/generate: the token ids, and the text if requested."""

    _has_one_prompt = True
    _nulls_of_answer = b',"metrics":null,"kv_transfer_params":null,"ec_transfer_params":null'

    def _first_members(self, name: str) -> dict[str, object]:
        request = self._request
        mode = "text" if request.wants_text else "tokens"
        members: dict[str, object] = {"request_id": f"generate-tokens-{name}", "output_mode": mode}
        return members if request.is_streamed else members | {"model": request.model, "created": int(time.time())}

    def _member_of_text(self) -> bytes:
        return b'"text":%b,' if self._request.wants_text else b""

    def _logprobs(self, progress: EventStream, name: bytes, *, are_given: bool) -> MemberWriter:
        if self._request.wants_text:
            return super()._logprobs(progress, name, are_given=are_given)
        return logprob_writers.IdEntries(name, are_given=are_given)

    def beginnings(self) -> bytes:
        if self._request.hides_prompts:
            return b""
        written_text = self._text_member and self._text_member % b'""'
        ending = b'"token_ids":[],"logprobs":null,%b}]%b%b}\n\n'
        return self._openings[0] + written_text + ending % (_NO_END, self._prompt_ids(0), self._usage_so_far(0, 0))
