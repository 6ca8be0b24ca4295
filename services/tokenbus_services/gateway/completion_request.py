"""CompletionRequest: what a client asks for, checked, whichever route it came by."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from tokenbus_contracts.generated.client_pb2 import WorkerStatus
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TokenPrompt
from tokenbus_services.delivery.stop_strings import Stopping
from tokenbus_services.gateway.body_fields import invalid
from tokenbus_services.gateway.chat_body import forced_call, tools_of
from tokenbus_services.gateway.errors import MODEL_NOT_FOUND, ApiError
from tokenbus_services.gateway.output_form import structured_output
from tokenbus_services.gateway.prompts import PromptEncoder
from tokenbus_services.gateway.request_body import RequestTypes
from tokenbus_services.gateway.tool_calls import ForcedCall
from tokenbus_services.gateway.vocabulary import Vocabulary
from tokenbus_services.settings import Settings

DEFAULT_MODEL = "tokenbus"
"""The name of the one model where the settings name none."""
_SEEDS = 2**64
_PASSED_ON = {
    "top_k": "top_k",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_tokens",
    "stop_token_ids": "stop_token_ids",
    "include_stop_str_in_output": "include_stop_string",
    "bad_words": "bad_words",
    "allowed_token_ids": "allowed_token_ids",
    "priority": "priority",
    "cache_salt": "cache_salt",
}
"""By a body's field the sampling parameter that has the same values."""


Ending = tuple[str, str | int | None]
"""Why a choice ended, `stop` or `length`; and which of the request's own stop texts or stop tokens ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """What each choice is generated with, and the form of the answer."""

    model: str
    prompts: Sequence[Sequence[int]]
    parent: str = ""
    """The model that the named one is a LoRA adapter of; empty: it is none."""
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignores_end: bool = False
    others: Mapping[str, Any] = field(default_factory=dict)
    """Those sampling parameters that are set beside the ones above, by the contract's names."""
    top_logprobs: int | None = None
    """How many alternatives; None: no logprobs at all."""
    wants_drafts: bool = False
    wants_ids: bool = False
    wants_columns: bool = False
    is_streamed: bool = False
    wants_usage: bool = False
    is_chat: bool = False
    forced: ForcedCall | None = None
    """What a chat has to call."""
    form_field: str = "response_format"
    """The field of the body that says the output's form."""

    @property
    def choices(self) -> int:
        """How many choices the answer has."""
        return len(self.prompts) * self.n

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompts have together."""
        return sum(map(len, self.prompts))

    @property
    def stopping(self) -> Stopping:
        """What ends the text of each choice."""
        others = self.others
        if not others:
            return Stopping(self.stop)
        least, special = others.get("min_tokens", 0), "include_special_tokens" in others
        return Stopping(self.stop, least, "include_stop_string" in others, special)

    def generate(self, index: int) -> Generate:
        """Return the request on the bus for a choice."""
        sampling = SamplingParameters(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=None if self.seed is None else (self.seed + index % self.n) % _SEEDS,
            stop=self.stop,
            ignore_end_token=self.ignores_end,
            lora_adapter=self.model if self.parent else None,
            **self.others,
        )
        model = self.parent or self.model
        return Generate(
            model="" if model == DEFAULT_MODEL else model,
            tokens=TokenPrompt(token_ids=self.prompts[index // self.n]),
            sampling=sampling,
            top_logprobs=self.top_logprobs,
            include_draft_logprobs=self.wants_drafts,
        )


class Reader:
    """Turns JSON bodies into CompletionRequests; every method raises an ApiError that names the field."""

    def __init__(self, settings: Settings, vocabulary: Vocabulary) -> None:
        self._settings = settings.gateway
        self._vocabulary = vocabulary
        self.encoder = PromptEncoder(settings.gateway, vocabulary)
        self.types = RequestTypes(settings)
        self.fixed_models = tuple(filter(None, map(str.strip, self._settings.models.split(","))))
        """The models that the settings name; empty: those of the workers."""
        self.models: dict[str, int] = dict.fromkeys(self.fixed_models or (DEFAULT_MODEL,), 0)
        """The models that requests may name, and how many tokens a request of each may have; 0: not known."""
        self.parents: dict[str, str] = {}
        """Of those that are LoRA adapters, the models that they belong to."""

    def learn_models(self, workers: Iterable[WorkerStatus]) -> None:
        """Take what workers serve: the models, where the settings name none, and each model's adapters and context."""
        found: dict[str, int] = {}
        parents: dict[str, str] = {}
        for worker in workers:
            name = worker.model or DEFAULT_MODEL
            known = [most for most in (found.get(name, 0), worker.max_model_tokens) if most]
            found[name] = min(known, default=0)
            parents |= dict.fromkeys(worker.lora_adapters, name)
        names = self.fixed_models or tuple(sorted(found)) or (DEFAULT_MODEL,)
        self.parents = {name: parents[name] for name in sorted(parents) if parents[name] in names and name not in names}
        self.models = {name: found.get(self.parents.get(name, name), 0) for name in (*names, *self.parents)}

    def completion(self, value: Any) -> CompletionRequest:  # noqa: ANN401 - JSON
        """Read a body of /v1/completions."""
        body = self.types.read(self.types.completion, value)
        common = self._common(body)
        if body.include_draft_logprobs and body.logprobs is None:
            raise invalid("include_draft_logprobs", "only with logprobs, got true without")
        return self._bounded(
            CompletionRequest(
                prompts=self.encoder.prompts(body.prompt, body.n, "prompt", adds_special=body.add_special_tokens),
                top_logprobs=body.logprobs,
                max_tokens=body.max_tokens,
                **common,
            )
        )

    def chat(self, value: Any) -> CompletionRequest:  # noqa: ANN401 - JSON
        """Read a body of /v1/chat/completions."""
        body = self.types.read(self.types.chat, value)
        common = self._common(body)
        top, newer, older = body.top_logprobs, body.max_completion_tokens, body.max_tokens
        if top is not None and not body.logprobs:
            raise invalid("top_logprobs", f"only with logprobs: true, got {top} without")
        if body.include_draft_logprobs and not body.logprobs:
            raise invalid("include_draft_logprobs", "only with logprobs: true, got true without")
        if newer is not None and older is not None and newer != older:
            raise invalid("max_tokens", f"the same as max_completion_tokens, {newer}, or absent, got {older}")
        tools = tools_of(body)
        forced = forced_call(body, tools)
        if forced is not None:
            common["others"]["structured_output"] = {"json_schema": {"schema": forced.schema}}
            common["form_field"] = "tool_choice"
        return self._bounded(
            CompletionRequest(
                prompts=self.encoder.prompts([self.encoder.chat(body, tools)], body.n, "messages"),
                forced=forced,
                top_logprobs=(top or 0) if body.logprobs else None,
                max_tokens=older if newer is None else newer,
                is_chat=True,
                **common,
            ),
            "max_tokens" if newer is None else "max_completion_tokens",
        )

    def inspection(self, value: Any) -> CompletionRequest:  # noqa: ANN401 - JSON
        """Read a body of /inspect."""
        body = self.types.read(self.types.inspection, value)
        return CompletionRequest(
            model=self.fixed_models[0] if self.fixed_models else DEFAULT_MODEL,
            prompts=[self.encoder.prompt(body.prompt, "prompt")],
            max_tokens=body.max_tokens,
            top_logprobs=body.top_logprobs,
            wants_drafts=body.drafts,
            is_streamed=True,
            **_sampling(body),
        )

    def tokenization(self, value: Any) -> bytes:  # noqa: ANN401 - JSON
        """Return the JSON that answers a body of /tokenize: the tokens of a text or a chat."""
        body = self.types.read(self.types.tokenization, value)
        if body.model is not None:
            self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", f"either this or messages, got {'neither' if body.prompt is None else 'both'}")
        if body.messages is not None:
            ids = self.encoder.chat(body, tools_of(body))
        else:
            ids = self.encoder.prompt(body.prompt, "prompt", adds_special=body.add_special_tokens is not False)
        texts = [self._vocabulary.token_name(token_id) for token_id in ids] if body.return_token_strs else None
        most = self.models.get(body.model or next(iter(self.models)), 0) or None
        return orjson.dumps({"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": texts})

    def detokenization(self, value: Any) -> bytes:  # noqa: ANN401 - JSON
        """Return the JSON that answers a body of /detokenize: the text of token ids."""
        body = self.types.read(self.types.detokenization, value)
        if body.model is not None:
            self.check_model(body.model)
        return orjson.dumps({"prompt": self.encoder.text(body.tokens, "tokens")})

    def check_model(self, name: str) -> None:
        """Refuse a model that requests may not name."""
        if name not in self.models and (self.fixed_models or name != DEFAULT_MODEL):
            message = f"model: one of {', '.join(self.models)}, got {name!r}"
            raise ApiError(404, message, param="model", code=MODEL_NOT_FOUND)

    def _common(self, body: Any) -> dict[str, Any]:  # noqa: ANN401 - a struct
        self.check_model(body.model)
        options = body.stream_options
        if options is not None and not body.stream:
            raise invalid("stream_options", "only where stream is true, got it without")
        return {
            "model": body.model,
            "parent": self.parents.get(body.model, ""),
            "n": body.n,
            "ignores_end": body.ignore_eos,
            "others": _others(body),
            "form_field": "response_format" if body.structured_outputs is None else "structured_outputs",
            "wants_drafts": body.include_draft_logprobs,
            "wants_ids": body.return_token_ids,
            "wants_columns": body.return_columns,
            "is_streamed": body.stream,
            "wants_usage": options is not None and bool(options.include_usage),
            **_sampling(body),
        }

    def _bounded(self, request: CompletionRequest, tokens_field: str = "max_tokens") -> CompletionRequest:
        most, count = self._settings.max_choices, request.choices
        if count > most:
            raise invalid("n", f"at most {most} choices, got {count}: {len(request.prompts)} prompts times n")
        context, tokens = self.models.get(request.model, 0), request.max_tokens
        if context and tokens is not None and tokens > context:
            raise invalid(tokens_field, f"at most {context}, the model's context, got {tokens}")
        return request


def _sampling(body: Any) -> dict[str, Any]:  # noqa: ANN401 - a struct
    stop = body.stop or ()
    return {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "seed": body.seed,
        "stop": (stop,) if isinstance(stop, str) else tuple(stop),
    }


def _others(body: Any) -> dict[str, Any]:  # noqa: ANN401 - a struct
    """Return the sampling parameters that say something, beside those of every route."""
    given = ((name, getattr(body, member)) for member, name in _PASSED_ON.items())
    found = {name: value for name, value in given if value is not None and value is not False}
    if body.top_k == -1:  # all, as 0 is
        del found["top_k"]
    if body.skip_special_tokens is False:
        found["include_special_tokens"] = True
    if body.logit_bias:
        found["logit_bias"] = [{"token_id": token_id, "bias": bias} for token_id, bias in body.logit_bias.items()]
    if body.response_format is not None or body.structured_outputs is not None:
        form = structured_output(body)
        if form is not None:
            found["structured_output"] = form
    return found
