"""CompletionRequest: a validated request of any route. Reader: reads request bodies."""

import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from sys import getsizeof
from typing import Any, NamedTuple, TypeVar

import msgspec
import orjson
from msgspec import field
from msgspec.structs import replace

from tokenbus.client.parameters import CONTINUATIONS
from tokenbus.client.tokens import Turn
from tokenbus.client.weight_spans import WeightSpan
from tokenbus.gateway import bodies, generate_body, messages_body, output_form, responses_body
from tokenbus.gateway.bridging import Bridge
from tokenbus.gateway.errors import MODEL_NOT_FOUND, SAMPLING_NAMES, TOKEN_SCORING, ApiError, body_field, too_long
from tokenbus.gateway.prompts import Cut, Prompt, PromptEncoder, echoed_text
from tokenbus.gateway.request_body import RequestTypes, check_texts
from tokenbus.gateway.stop_strings import Stopping
from tokenbus.gateway.tool_parsers import PARSERS
from tokenbus.gateway.validation import checked_session, invalid, json_text
from tokenbus.gateway.vocabulary import Vocabulary
from tokenbus.settings import Settings
from tokenbus.settings.errors import shown
from tokenbus_contracts.generated.client_pb2 import WorkerStatus
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TokenPrompt

T = TypeVar("T")
B = TypeVar("B", bodies.Chat, bodies.Completion)
DEFAULT_MODEL = "tokenbus"
"""Name of the model if the settings and the workers name no models."""
_SEEDS = 2**64
_MAX_ENGINE_BYTES = 65_536
_SAME_NAMES = (
    *("max_tokens", "temperature", "top_p", "top_k", "seed", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "min_tokens", "stop_token_ids", "bad_words", "allowed_token_ids", "priority", "cache_salt"),
)
_SAMPLING = {name: name for name in _SAME_NAMES} | SAMPLING_NAMES
"""Maps a field of the body to the sampling parameter that takes its value unchanged."""
_OTHER_NAMES = {"response_format": "structured_outputs", "return_logprobs_of": "logprob_token_ids"}
"""Maps the usual name of a body's field to another name of the same field."""
_NOT_IN_BATCHES = ("stream", "tools", "functions", "prompt_logprobs", "prompt_logprob_token_ids")
_COPY_BYTES = 16
"""Maximum size of a field's copies for all choices together, in bytes per token of gateway.max_prompt_tokens."""
_MESSAGE_BYTES = 48
_IDS = "I"
_KEPT = frozenset({"stop", "min_tokens", "max_tokens", "include_stop_string", "include_special_tokens"})
"""Sampling parameters that an answer still needs after the requests are sent."""
_ECHO_BYTES, _SCORE_BYTES = 16, 64
"""Estimated number of bytes of a prompt token's logprob in an echo, and in `prompt_logprobs`."""


class Ending(NamedTuple):
    """How a choice ended."""

    reason: str
    stop: str | int | None
    weight_spans: tuple[WeightSpan, ...] = ()
    turns: Sequence[Turn] = ()


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request: how to generate the choices, and how to write the answer."""

    model: str
    prompts: Sequence[Sequence[int]]
    parent: str = ""
    """The base model if `model` is a LoRA adapter, or else empty."""
    n: int = 1
    sampling: Mapping[str, Any] = field(default_factory=dict)
    top_logprobs: int | None = None
    wants_drafts: bool = False
    continuation: str = "any"
    wants_ids: bool = False
    """Whether the answer contains the token ids of its choices and, unless `hides_prompts`, of its prompts."""
    hides_prompts: bool = False
    wants_columns: bool = False
    is_streamed: bool = False
    wants_usage: bool = False
    wants_running_usage: bool = False
    names_ids: bool = False
    echoes: Sequence[str] = ()
    prompt_scoring: Mapping[str, Any] | None = None
    token_scoring: Mapping[str, Any] = field(default_factory=dict)
    names_alternatives: bool = False
    """Whether the alternatives are the `token_ids` of `token_scoring`."""
    wants_prompt_logprobs: bool = False
    """Whether the answer contains `prompt_logprobs`."""
    scores_once: bool = False
    """Whether the prompt is scored for the first choice only. The answer shows the scores of the prompt once."""
    name: str = ""
    """The id that the client chose for the answer. If empty, the answer has the id of its first request on the bus."""
    session: str = ""
    conversation: bytes = b""
    """The digest of a session's chat if the next turn may be bridged, or else empty."""
    bridging: str = ""
    """The value of `BridgedPrompt.result`, which says whether the prompt continues the session's last turn."""
    is_chat: bool = False
    wants_text: bool = True
    forced: output_form.ForcedCall | None = None
    auto: output_form.AutoCalls | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    """Maps the usual names of fields to the names in the client's body, which errors must use."""
    echoed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def stopping(self) -> Stopping:
        given = self.sampling
        stops, least = tuple(given.get("stop", ())), given.get("min_tokens", 0)
        return Stopping(stops, least, "include_stop_string" in given, "include_special_tokens" in given)

    @property
    def scored_tokens(self) -> int:
        """Number of prompt tokens to score, summed over all choices."""
        return 0 if self.prompt_scoring is None else self.prompt_tokens * (1 if self.scores_once else self.n)

    @property
    def scored_values(self) -> int:
        """Number of logprobs of prompt tokens, including the logprobs of alternatives."""
        asked = self.prompt_scoring or {}
        return self.scored_tokens * (1 + (asked.get("top_logprobs", 0) or len(asked.get("token_ids", ()))))

    @property
    def scored_bytes(self) -> int:
        """Number of bytes of the prompts' scores: an id and a logprob for each value, and a rank for each token."""
        return 8 * self.scored_values + 4 * self.scored_tokens

    def kept(self) -> "CompletionRequest":
        """Return a copy for the answer, without the engine's parameters and without the ids of hidden prompts."""
        shows_prompts = self.echoes or (self.wants_ids and not self.hides_prompts)
        prompts = self.prompts if shows_prompts else [range(len(each)) for each in self.prompts]
        sampling = {name: value for name, value in self.sampling.items() if name in _KEPT}
        return replace(self, prompts=prompts, sampling=sampling)

    @property
    def size(self) -> int:
        """Number of bytes of the prompts and texts in memory."""
        return _memory_of(*self.prompts, *self.echoes, self.sampling, self.echoed, self.forced and self.forced.schema)

    def packed(self) -> bytes:
        prompts = [array(_IDS, each).tobytes() for each in self.prompts]
        return msgspec.msgpack.encode((replace(self, prompts=()), prompts))

    def generates(self, tenant: int = 0) -> Iterator[Generate]:
        """Yield one request on the bus for each choice. Choices of the same prompt get copies of one message.

        In the requests of a session, `tenant` identifies the client's key.
        """
        seed = self.sampling.get("seed")
        for index in range(0, self.choices, self.n):
            first = self.generate(index)
            if self.session:
                first.session, first.tenant = self.session, tenant
            yield first
            for number in range(1, self.n):
                generate = Generate()
                generate.CopyFrom(first)
                if self.scores_once:
                    generate.ClearField("prompt_scoring")
                if seed is not None:
                    generate.sampling.seed = (seed + number) % _SEEDS
                yield generate

    def generate(self, index: int) -> Generate:
        sampling = dict(self.sampling)
        if "seed" in sampling:
            sampling["seed"] = (sampling["seed"] + index % self.n) % _SEEDS
        model = self.parent or self.model
        return Generate(
            model="" if model == DEFAULT_MODEL else model,
            tokens=TokenPrompt(token_ids=self.prompts[index // self.n]),
            sampling=SamplingParameters(**sampling, lora_adapter=self.model if self.parent else None),
            top_logprobs=self.top_logprobs,
            include_draft_logprobs=self.wants_drafts,
            continuation_policy=CONTINUATIONS[self.continuation],
            prompt_scoring=self.prompt_scoring,
            token_scoring=self.token_scoring or None,
        )


_DECODER = msgspec.msgpack.Decoder(tuple[CompletionRequest, list[bytes]])


def unpacked(data: bytes) -> CompletionRequest:
    """Return a request from its packed form. Prompts become arrays, because lists take ten times the memory."""
    request, prompts = _DECODER.decode(data)
    return replace(request, prompts=[array(_IDS, each) for each in prompts])


class BodyHeaders(NamedTuple):
    """HTTP headers that are read like fields of the body."""

    name: str = ""
    """The header `x-request-id`, which becomes the answer's id."""
    adapter: str = ""
    """The model that a header of `/invocations` names."""
    session: str = ""
    """The header `x-session-id`."""


class Reader:
    """Reads JSON bodies with one method for each route. Every method raises an ApiError that names the wrong field.

    A method returns a CompletionRequest, or the JSON of the answer.
    """

    def __init__(self, settings: Settings, vocabulary: Vocabulary) -> None:
        self._settings = settings.gateway
        self._vocabulary = vocabulary
        self.encoder = PromptEncoder(settings.gateway, vocabulary)
        self.bridge = Bridge(self._settings, self.encoder, vocabulary) if self._settings.bridge_turns else None
        self.types = RequestTypes(settings)
        self.fixed_models = tuple(filter(None, map(str.strip, self._settings.models.split(","))))
        """Models in the settings, or empty if the workers name the models."""
        self.models: dict[str, int] = dict.fromkeys(self.fixed_models or (DEFAULT_MODEL,), 0)
        """The context size, in tokens, of each model that requests may name. Zero means that the size is unknown."""
        self.knows_models = bool(self.fixed_models)
        self.parents: dict[str, str] = {}
        self.headers = BodyHeaders()

    def learn_models(self, workers: Iterable[WorkerStatus]) -> None:
        """Learn the workers' models, their adapters and their context sizes."""
        found: dict[str, int] = {}
        parents: dict[str, str] = {}
        for worker in workers:
            name = worker.model or DEFAULT_MODEL
            known = [most for most in (found.get(name, 0), worker.max_model_tokens) if most]
            found[name] = min(known, default=0)
            parents |= dict.fromkeys(worker.lora_adapters, name)
        self.knows_models |= bool(found)
        names = self.fixed_models or tuple(sorted(found)) or (DEFAULT_MODEL,)
        self.parents = {name: parents[name] for name in sorted(parents) if parents[name] in names and name not in names}
        self.models = {name: found.get(self.parents.get(name, name), 0) for name in (*names, *self.parents)}

    def completion(self, value: Any) -> CompletionRequest:  # noqa: ANN401 - JSON
        return self._completion(self.types.read(bodies.Completion, value))

    def _completion(self, body: bodies.Completion) -> CompletionRequest:
        common = self._common(body)
        if body.logprob_token_ids is not None and body.echo:
            raise invalid("logprob_token_ids", "only without echo, got it with")
        if body.include_draft_logprobs and body.logprobs is None:
            raise invalid("include_draft_logprobs", "only with logprobs, got true without")
        if body.best_of is not None and body.best_of > body.n:
            raise invalid("best_of", f"at most n, {body.n}, as choices are not selected, got {body.best_of}")
        special, cut = bool(body.add_special_tokens), self._cut(body, common["model"])
        prompts = self.encoder.prompts(body.prompt, body.n, "prompt", adds_special=special, cut=cut)
        if body.echo:
            given = zip(body.prompt, prompts, strict=True)
            common["echoes"] = [
                each if isinstance(each, str) else self.encoder.text(ids, "prompt") for each, ids in given
            ]
            if body.logprobs is not None and common["prompt_scoring"] is None:
                common["prompt_scoring"] = {"top_logprobs": body.logprobs}
        if common["sampling"].get("max_tokens") == 0:
            del common["sampling"]["max_tokens"]
            if not (body.echo or common["prompt_scoring"]):
                raise invalid("max_tokens", "at least 1 without echo or prompt_logprobs, got 0")
            common["prompt_scoring"] = {**(common["prompt_scoring"] or {}), "without_generation": True}
        logprobs = 0 if common["names_alternatives"] else body.logprobs
        return self._bounded(CompletionRequest(prompts=prompts, top_logprobs=logprobs, **common))

    def chat(self, value: Any) -> CompletionRequest:  # noqa: ANN401 - JSON
        return self._chat(self.types.read(bodies.Chat, value))

    def invocation(self, value: Any) -> CompletionRequest:  # noqa: ANN401 - JSON
        """Read a chat if the body has messages, or else a completion."""
        return self.chat(value) if isinstance(value, dict) and "messages" in value else self.completion(value)

    def chat_batch(self, value: Any) -> CompletionRequest:  # noqa: ANN401 - JSON
        """Read several conversations, each of which becomes a prompt of the same answer."""
        body = self.types.read(bodies.ChatBatch, value)
        for name in _NOT_IN_BATCHES:
            if getattr(body, name):
                raise invalid(name, "none in a batch of chats, got some")
        if body.n != 1:
            raise invalid("n", f"1 for a batch of chats, got {body.n}")
        return self._chat(body)

    def completion_rendering(self, value: Any) -> bytes:  # noqa: ANN401 - JSON
        body = self.types.read(bodies.Completion, value)
        return orjson.dumps(self._rendered(body, self._completion(body)), option=orjson.OPT_NON_STR_KEYS)

    def chat_rendering(self, value: Any) -> bytes:  # noqa: ANN401 - JSON
        return self._rendering(self.types.read(bodies.Chat, value))

    def messages_rendering(self, value: Any) -> bytes:  # noqa: ANN401 - JSON
        chat = messages_body.chat_of(self.types.read(messages_body.Messages, value))
        return self._translated(chat, messages_body.FIELDS, self._rendering)

    def responses_rendering(self, value: Any) -> bytes:  # noqa: ANN401 - JSON
        body = self.types.read(responses_body.Responses, responses_body.typed(value))
        render = partial(self._rendering, kind="resp_")
        return self._translated(responses_body.chat_of(body), responses_body.FIELDS, render)

    def _rendering(self, body: bodies.Chat, kind: str = "chatcmpl-") -> bytes:
        (answer,) = self._rendered(body, self._chat(body), kind)
        return orjson.dumps(answer, option=orjson.OPT_NON_STR_KEYS)

    def _rendered(
        self, body: bodies.Chat | bodies.Completion, request: CompletionRequest, kind: str = "cmpl-"
    ) -> list[dict[str, Any]]:
        """Return a body of /inference/v1/generate for each prompt. The request ids begin with `kind`."""
        if body.prompt_logprob_token_ids is not None:
            raise invalid("prompt_logprob_token_ids", "none where a body is rendered, got some")
        same = (each for each in generate_body.SamplingParams.__struct_fields__ if each in body.__struct_fields__)
        params = {name: value for name in same if (value := getattr(body, name)) is not None}
        form = request.sampling.get("structured_output")
        params |= {
            "logprobs": None if request.names_alternatives else request.top_logprobs,
            "structured_outputs": None if form is None else output_form.form_of_vllm(form),
        }
        if body.vllm_xargs:
            params["extra_args"] = body.vllm_xargs
        base, context = kind + (request.name or uuid.uuid4().hex), self.models.get(request.model, 0)
        options = None if body.stream_options is None else msgspec.to_builtins(body.stream_options)
        answers = []
        for number, prompt in enumerate(request.prompts):
            most = request.sampling.get("max_tokens", context - len(prompt) if context else None)
            answers.append(
                {
                    "request_id": base if len(request.prompts) == 1 else f"{base}-{number}",
                    "token_ids": prompt,
                    "sampling_params": params | {"max_tokens": most},
                    "model": request.model,
                    "stream": request.is_streamed,
                    "stream_options": options,
                    "cache_salt": body.cache_salt,
                    "priority": body.priority or 0,
                    **({"session_id": request.session} if request.session else {}),
                    **{name: value for name in TOKEN_SCORING if (value := getattr(body, name))},
                    "features": None,
                    "content_parts": None,
                    "token_offsets": self._offsets(body, number, request) if body.return_token_offsets else None,
                    "kv_transfer_params": None,
                    "ec_transfer_params": None,
                }
            )
        return answers

    def _offsets(
        self, body: bodies.Chat | bodies.Completion, number: int, request: CompletionRequest
    ) -> list[tuple[int, int]] | None:
        if request.bridging == "bridged":  # encoding the text would give other tokens
            return None
        text: Prompt
        if isinstance(body, bodies.Chat):
            text, adds_special = self.encoder.chat_text(body, output_form.tools_of(body))
        else:
            text, adds_special = body.prompt[number], bool(body.add_special_tokens)
        return self.encoder.spans(text, adds_special=adds_special, cut=self._cut(body, request.model))

    def messages(self, value: Any) -> CompletionRequest:  # noqa: ANN401 - JSON
        chat = messages_body.chat_of(self.types.read(messages_body.Messages, value))
        return self._request(chat, messages_body.FIELDS, self._chat)

    def token_count(self, value: Any) -> bytes:  # noqa: ANN401 - JSON
        chat = messages_body.chat_of(self.types.read(messages_body.TokenCount, value))
        return self._translated(chat, messages_body.FIELDS, self._counted)

    def responses(self, value: Any) -> CompletionRequest:  # noqa: ANN401 - JSON
        body = self.types.read(responses_body.Responses, responses_body.typed(value))
        request = self._request(responses_body.chat_of(body), responses_body.FIELDS, self._chat)
        return replace(request, echoed=responses_body.echoed(body))

    def generation(self, value: Any) -> CompletionRequest:  # noqa: ANN401 - JSON
        body = self.types.read(generate_body.Generate, value)
        if body.output_mode == "text" and body.sampling_params.detokenize is False:
            raise invalid("output_mode", "tokens where sampling_params.detokenize is false, got text")
        completion = generate_body.completion_of(body)
        request = self._request(completion, generate_body.FIELDS, self._completion)
        scores_once = "without_generation" not in (request.prompt_scoring or {})
        hides, wants_text = not body.return_token_ids, body.output_mode == "text"
        return replace(request, wants_text=wants_text, scores_once=scores_once, hides_prompts=hides)

    def _request(self, body: B, names: Mapping[str, str], read: Callable[[B], CompletionRequest]) -> CompletionRequest:
        request = self._translated(body, names, read)
        own = {name: names.get(other, other) for name, other in request.fields.items()}
        return replace(request, fields={**names, **own})

    def _translated(self, body: B, names: Mapping[str, str], read: Callable[[B], T]) -> T:
        """Read another API's body as a chat or a completion. Errors use the field names of the other API."""
        try:
            check_texts(body)
            return read(body)
        except ApiError as error:
            raise error.renamed(names) from None

    def _counted(self, chat: bodies.Chat) -> bytes:
        self._check_model(chat.model)
        return orjson.dumps({"input_tokens": len(self.encoder.chat(chat, output_form.tools_of(chat)))})

    def _chat(self, body: bodies.Chat) -> CompletionRequest:
        common = self._common(body)
        common["fields"]["prompt"] = "messages"
        output_form.take_older_names(body)
        top, newer, older = body.top_logprobs, body.max_completion_tokens, body.max_tokens
        if top and not body.logprobs:
            raise invalid("top_logprobs", f"only with logprobs: true, got {top} without")
        if body.include_draft_logprobs and not body.logprobs:
            raise invalid("include_draft_logprobs", "only with logprobs: true, got true without")
        if newer is not None:
            if older is not None and newer != older:
                raise invalid("max_tokens", f"the same as max_completion_tokens, {newer}, or absent, got {older}")
            common["sampling"]["max_tokens"] = newer
        tools = output_form.tools_of(body)
        forced = output_form.forced_call(body, tools)
        if forced is not None:
            common["sampling"]["structured_output"] = {"json_schema": {"schema": forced.schema}}
            common["fields"]["response_format"] = "tool_choice"
        auto = output_form.auto_calls(body, self._settings.tool_call_parser)
        if auto is not None and PARSERS[auto.parser].shows_special:
            common["sampling"]["include_special_tokens"] = True
        cut = self._cut(body, common["model"])
        is_batch = isinstance(body, bodies.ChatBatch)
        chats = [msgspec.structs.replace(body, messages=each) for each in body.messages] if is_batch else [body]
        prompts = self._bridged(body, tools, common) if cut is None else []
        if not prompts:
            prompts = [self.encoder.chat(each, tools, cut) for each in chats]
        prompts = self.encoder.prompts(prompts, body.n, "messages")
        if body.echo:
            if forced is not None or auto is not None:
                raise invalid("echo", "only where no function may be called, got it with tools")
            echoes = [echoed_text(each) for each in chats]
            common["echoes"] = echoes if any(echoes) else ()
        logprobs = (0 if common["names_alternatives"] else top or 0) if body.logprobs else None
        common |= {"is_chat": True, "scores_once": True, "forced": forced, "auto": auto}
        request = CompletionRequest(prompts=prompts, top_logprobs=logprobs, **common)
        return self._bounded(request, "max_tokens" if newer is None else "max_completion_tokens")

    def _bridged(
        self, body: bodies.Chat, tools: Sequence[Mapping[str, Any]], common: dict[str, Any]
    ) -> list[list[int]]:
        """Return the prompt that continues the last turn, if possible. Add the conversation's digest to `common`."""
        is_one = body.n == 1 and not isinstance(body, bodies.ChatBatch)
        is_plain = body.add_generation_prompt and not (body.add_special_tokens or body.echo)
        if self.bridge is None or not (common["session"] and is_one and is_plain):
            return []
        most, context = self._settings.max_prompt_tokens, self.models.get(common["model"], 0)
        most = min(most, context - 1) if context else most
        found = self.bridge.prompt(body, tools, common["session"], common["model"], most)
        common |= {"conversation": found.digest, "bridging": found.result}
        return [found.ids] if found.ids else []

    def inspection(self, value: Any) -> CompletionRequest:  # noqa: ANN401 - JSON
        body = self.types.read(bodies.Inspection, value)
        return CompletionRequest(
            model=self.fixed_models[0] if self.fixed_models else DEFAULT_MODEL,
            prompts=[self.encoder.prompt(body.prompt, "prompt")],
            sampling=_sampling(body),
            top_logprobs=body.top_logprobs,
            token_scoring={"entropies": True} if body.return_entropies else {},
            wants_drafts=bool(body.drafts),
            is_streamed=True,
            session=self._session(body.session_id),
        )

    def tokenization(self, value: Any) -> bytes:  # noqa: ANN401 - JSON
        body = self.types.read(bodies.Tokenization, value)
        self._check_model(body.model)
        if body.messages is not None and body.prompt is None:
            ids = self.encoder.chat(body, output_form.tools_of(body))
        elif body.prompt is not None and body.messages is None:
            ids = self.encoder.prompt(body.prompt, "prompt", adds_special=body.add_special_tokens is not False)
        else:
            raise invalid("prompt", f"either this or messages, got {'neither' if body.prompt is None else 'both'}")
        texts = None
        if body.return_token_strs:
            names = {token_id: self._vocabulary.token_name(token_id) for token_id in set(ids)}
            texts = [names[token_id] for token_id in ids]
        most = self.models.get(body.model or next(iter(self.models)), 0) or None
        return orjson.dumps({"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": texts})

    def detokenization(self, value: Any) -> bytes:  # noqa: ANN401 - JSON
        body = self.types.read(bodies.Detokenization, value)
        self._check_model(body.model)
        return orjson.dumps({"prompt": self.encoder.text(body.tokens, "tokens")})

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.models and (self.fixed_models or name != DEFAULT_MODEL):
            message = f"model: one of {', '.join(self.models)}, got {name!r}"
            raise ApiError(404, message, param="model", code=MODEL_NOT_FOUND)

    def _common(self, body: bodies.Generation) -> dict[str, Any]:
        model = self.headers.adapter or body.model or next(iter(self.models))
        self._check_model(model)
        options, names_ids = body.stream_options or bodies.StreamOptions(), body.return_tokens_as_token_ids
        forces_usage = bool(body.stream and self._settings.force_include_usage)
        if body.stream_options is not None and not body.stream:
            raise invalid("stream_options", "only where stream is true, got it without")
        return {
            "model": model,
            "parent": self.parents.get(model, ""),
            "n": body.n,
            "sampling": _sampling(body),
            "fields": {name: other for name, other in _OTHER_NAMES.items() if getattr(body, other) is not None},
            "wants_drafts": body.include_draft_logprobs,
            "continuation": (body.tokenbus and body.tokenbus.continue_) or "any",
            "wants_ids": body.return_token_ids,
            "wants_columns": body.return_columns,
            "is_streamed": body.stream,
            "wants_usage": bool(options.include_usage) or forces_usage,
            "wants_running_usage": forces_usage or bool(options.include_usage and options.continuous_usage_stats),
            "names_ids": self._settings.return_tokens_as_token_ids if names_ids is None else names_ids,
            "name": self.headers.name or body.request_id or "",
            "session": self._session(body.session_id),
            "prompt_scoring": _prompt_scoring(body),
            "token_scoring": _token_scoring(body),
            "names_alternatives": body.logprob_token_ids is not None,
            "wants_prompt_logprobs": body.prompt_logprobs is not None or body.prompt_logprob_token_ids is not None,
        }

    def _session(self, given: str | None) -> str:
        """Return the label of the session from the header or from the body, or an empty text without a session."""
        header = self.headers.session
        if not given:
            return header
        if header and given != header:
            raise invalid("session_id", f"the same as x-session-id, {shown(header)}, or absent, got {shown(given)}")
        return checked_session("session_id", given)

    def _bounded(self, request: CompletionRequest, tokens_field: str = "max_tokens") -> CompletionRequest:
        most, count = self._settings.max_choices, request.choices
        if count > most:
            raise invalid("n", f"at most {most} choices, got {count}: {len(request.prompts)} prompts times n")
        context, tokens = self.models.get(request.model, 0), request.sampling.get("max_tokens", 0)
        if context and tokens > context:
            raise invalid(tokens_field, f"at most {context}, the model's context, got {tokens}")
        self._check_copies(request)
        self._check_scores(request)
        longest = max(map(len, request.prompts))
        if context and longest >= context:
            raise too_long("messages" if request.is_chat else "prompt", context, longest)
        return request

    def _check_copies(self, request: CompletionRequest) -> None:
        """Raise an ApiError if a field is too large, because each choice sends a copy of the field to a worker."""
        most, choices = _COPY_BYTES * self._settings.max_prompt_tokens, request.choices
        parameters = {f"sampling.{name}": value for name, value in request.sampling.items()}
        parameters |= {f"token_scoring.{name}": value for name, value in request.token_scoring.items()}
        for name, value in parameters.items():
            size = choices * _bytes_of(value) if isinstance(value, str | list | dict) else 0
            if size > most:
                field, limit = body_field(name), f"at most {most} bytes of all choices together"
                raise invalid(request.fields.get(field, field), f"{limit}, got {size} of {choices}")

    def _check_scores(self, request: CompletionRequest) -> None:
        """Raise an ApiError if the scores of the prompts do not fit into an answer."""
        is_shown, values = request.wants_prompt_logprobs, request.scored_values
        most = self._settings.answer_bytes // (_SCORE_BYTES if is_shown else _ECHO_BYTES)
        if values > most:
            is_named = bool((request.prompt_scoring or {}).get("token_ids"))
            name = "prompt_logprob_token_ids" if is_named else "prompt_logprobs" if is_shown else "echo"
            limit = f"at most {most} logprobs of all choices' prompts together"
            raise invalid(name, f"{limit}, got {values} of {request.scored_tokens} tokens")

    def _cut(self, body: bodies.Generation, model: str) -> Cut | None:
        most, context = body.truncate_prompt_tokens, self.models.get(model, 0)
        if most is None:
            return None
        if most == 0:
            raise invalid("truncate_prompt_tokens", "-1 or at least 1, got 0")
        if context and most > context:
            raise invalid("truncate_prompt_tokens", f"at most {context}, the model's context, got {most}")
        if most == -1:  # the context must also hold one token of the answer
            most = context - 1 if context else self._settings.max_prompt_tokens
        return Cut(most, body.truncation_side)


def _bytes_of(value: object) -> int:
    """Return the approximate size in bytes of a parameter in a request on the bus."""
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, dict):
        return _MESSAGE_BYTES + sum(map(_bytes_of, value.values()))
    if isinstance(value, list):
        return 4 * len(value) if value and isinstance(value[0], int) else sum(map(_bytes_of, value))
    return 8


def _memory_of(*values: object) -> int:
    """Return the memory, in bytes, of values and their members. The size of an array includes its ids."""
    size, left = 0, list(values)
    for value in left:  # the loop appends members to the list
        size += getsizeof(value)
        if isinstance(value, dict):
            left += (*value, *value.values())
        elif isinstance(value, list):
            left += value
    return size


def _prompt_scoring(body: bodies.Generation) -> dict[str, Any] | None:
    k, ids = body.prompt_logprobs, body.prompt_logprob_token_ids
    if k is None and ids is None:
        return None
    if body.stream:  # as in vLLM, chunks have no prompt scores
        raise invalid(
            "prompt_logprobs" if k is not None else "prompt_logprob_token_ids", "only without stream, got it with"
        )
    if ids is None:
        return {"top_logprobs": k}
    if k:
        raise invalid("prompt_logprobs", f"0 or absent with prompt_logprob_token_ids, got {k}")
    return {"token_ids": ids}


def _token_scoring(body: bodies.Generation) -> dict[str, Any]:
    if body.logprob_token_ids is not None:
        for name in ("return_logprobs_of", "return_columns"):
            if getattr(body, name):
                raise invalid(name, "none with logprob_token_ids, got it")
    scoring = TOKEN_SCORING | {"logprob_token_ids": "token_ids"}
    asked = {member: value for member in scoring if (value := getattr(body, member))}
    logprobs = getattr(body, "logprobs", None)
    for member in asked:
        if logprobs is None or logprobs is False:
            raise invalid(member, "only with logprobs, got it without")
    return {scoring[member]: value for member, value in asked.items()}


def _sampling(body: bodies.Sampling) -> dict[str, Any]:
    given = ((name, getattr(body, member, None)) for member, name in _SAMPLING.items())
    found = {name: value for name, value in given if value is not None and value is not False}
    if body.stop:
        found["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    if not isinstance(body, bodies.Generation):
        return found
    if body.top_k == -1:  # -1 means all tokens, as 0 does
        del found["top_k"]
    if body.skip_special_tokens is False:
        found["include_special_tokens"] = True
    if body.logit_bias:
        found["logit_bias"] = [{"token_id": token_id, "bias": bias} for token_id, bias in body.logit_bias.items()]
    if body.vllm_xargs:
        found["engine_arguments"] = json_text("vllm_xargs", body.vllm_xargs, _MAX_ENGINE_BYTES)
    form = output_form.structured_output(body)
    if form is not None:
        found["structured_output"] = form
    return found
