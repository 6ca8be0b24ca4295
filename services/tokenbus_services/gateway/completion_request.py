"""CompletionRequest: what a client asks for, checked, whichever route it came by."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TokenPrompt
from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.gateway.request_body import RequestTypes, invalid, structured_output
from tokenbus_services.gateway.vocabulary import Vocabulary
from tokenbus_services.settings import Settings

DEFAULT_MODEL = "tokenbus"
"""The name of the one model where the settings name none."""
_SEEDS = 2**64
_MAX_PROMPTS_SHARE = 4
"""The prompts of an answer have at most this many times gateway.max_prompt_tokens together, each counted `n` times."""
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
_ROLES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}


Ending = tuple[str, str | int | None]
"""Why a choice ended, `stop` or `length`; and which of the request's own stop texts or stop tokens ended it."""


class Stopping(NamedTuple):
    """What ends an answer's text: the request's own stop texts and stop tokens."""

    texts: Sequence[str] = ()
    token_ids: Collection[int] = ()
    min_tokens: int = 0
    """A stop text counts where it ends behind so many tokens."""
    is_included: bool = False
    """Whether the stop belongs to the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """What each choice is generated with, and the form of the answer."""

    model: str
    prompts: Sequence[Sequence[int]]
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
        stop_ids = frozenset(others.get("stop_token_ids", ()))
        return Stopping(self.stop, stop_ids, others.get("min_tokens", 0), "include_stop_string" in others)

    def generate(self, index: int) -> Generate:
        """Return the request on the bus for a choice."""
        sampling = SamplingParameters(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=None if self.seed is None else (self.seed + index) % _SEEDS,
            stop=self.stop,
            ignore_end_token=self.ignores_end,
            **self.others,
        )
        return Generate(
            model="" if self.model == DEFAULT_MODEL else self.model,
            tokens=TokenPrompt(token_ids=self.prompts[index // self.n]),
            sampling=sampling,
            top_logprobs=self.top_logprobs,
            include_draft_logprobs=self.wants_drafts,
        )


class Reader:
    """Turns JSON bodies into CompletionRequests; every method raises an ApiError that names the field."""

    def __init__(self, settings: Settings, vocabulary: Vocabulary) -> None:
        """Take the bounds, and the vocabulary that encodes texts."""
        self._settings = settings.gateway
        self._vocabulary = vocabulary
        self.types = RequestTypes(settings)
        self.models = tuple(filter(None, map(str.strip, self._settings.models.split(",")))) or (DEFAULT_MODEL,)
        """The models that requests may name."""

    def completion(self, value: Any) -> CompletionRequest:  # noqa: ANN401 - JSON
        """Read a body of /v1/completions."""
        body = self.types.read(self.types.completion, value)
        common = self._common(body)
        if body.include_draft_logprobs and body.logprobs is None:
            raise invalid("include_draft_logprobs", "only with logprobs, got true without")
        return self._bounded(
            CompletionRequest(
                prompts=self._encode(body.prompt, body.n, "prompt"),
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
        return self._bounded(
            CompletionRequest(
                prompts=self._encode([_prompt(body.messages, self._settings.chat_template)], body.n, "messages"),
                top_logprobs=(top or 0) if body.logprobs else None,
                max_tokens=older if newer is None else newer,
                is_chat=True,
                **common,
            )
        )

    def inspection(self, value: Any) -> CompletionRequest:  # noqa: ANN401 - JSON
        """Read a body of /inspect."""
        body = self.types.read(self.types.inspection, value)
        return CompletionRequest(
            model=self.models[0],
            prompts=[self._encode_one(body.prompt, "prompt")],
            max_tokens=body.max_tokens,
            top_logprobs=body.top_logprobs,
            wants_drafts=body.drafts,
            is_streamed=True,
            **_sampling(body),
        )

    def _common(self, body: Any) -> dict[str, Any]:  # noqa: ANN401 - a struct
        if body.model not in self.models:
            message = f"model: one of {', '.join(self.models)}, got {body.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        options = body.stream_options
        if options is not None and not body.stream:
            raise invalid("stream_options", "only where stream is true, got it without")
        return {
            "model": body.model,
            "n": body.n,
            "ignores_end": body.ignore_eos,
            "others": _others(body),
            "wants_drafts": body.include_draft_logprobs,
            "wants_ids": body.return_token_ids,
            "wants_columns": body.return_columns,
            "is_streamed": body.stream,
            "wants_usage": options is not None and bool(options.include_usage),
            **_sampling(body),
        }

    def _bounded(self, request: CompletionRequest) -> CompletionRequest:
        most, count = self._settings.max_choices, request.choices
        if count > most:
            raise invalid("n", f"at most {most} choices, got {count}: {len(request.prompts)} prompts times n")
        return request

    def _encode(self, prompts: Sequence[str | list[int]], n: int, name: str) -> list[list[int]]:
        most, tokens, encoded = _MAX_PROMPTS_SHARE * self._settings.max_prompt_tokens, 0, []
        for prompt in prompts:
            encoded.append(self._encode_one(prompt, name))
            tokens += n * len(encoded[-1])
            if tokens > most:
                raise invalid(name, f"at most {most} tokens together, each prompt n times, got {tokens} or more")
        return encoded

    def _encode_one(self, prompt: str | list[int], name: str) -> list[int]:
        most = self._settings.max_prompt_tokens
        if not isinstance(prompt, str):
            return prompt
        least = self._vocabulary.least_tokens(len(prompt))
        if least > most:  # no need to encode it
            raise invalid(name, f"at most {most} tokens, got at least {least}")
        ids = self._vocabulary.encode(prompt)
        if not 1 <= len(ids) <= most:
            raise invalid(name, f"1 to {most} tokens, got {len(ids)}")
        return ids


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
    if body.logit_bias:
        found["logit_bias"] = [{"token_id": token_id, "bias": bias} for token_id, bias in body.logit_bias.items()]
    if body.response_format is not None or body.structured_outputs is not None:
        form = structured_output(body)
        if form is not None:
            found["structured_output"] = form
    return found


def _prompt(messages: Sequence[Any], template: str) -> str:
    """Return the prompt of a chat.

    `text`: the messages' texts, one a line, for models that continue any text and know no roles.
    `roles`: a line for each message, `User: ...`, and `Assistant:` at the end.
    """
    contents = [message.content for message in messages]
    texts = [each if isinstance(each, str) else "".join(part.text for part in each) for each in contents]
    if template == "text":
        return "\n".join(texts)
    lines = [f"{_ROLES[message.role]}: {text}" for message, text in zip(messages, texts, strict=True)]
    return "\n".join([*lines, "Assistant:"])
