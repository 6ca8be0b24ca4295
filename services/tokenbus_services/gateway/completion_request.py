"""CompletionRequest: what a request wants, checked, whichever route it came by."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TokenPrompt
from tokenbus_services.gateway.chat import prompt_of
from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.gateway.fields import FieldError, Table
from tokenbus_services.gateway.vocabulary import Vocabulary
from tokenbus_services.settings import GatewaySettings

DEFAULT_MODEL = "tokenbus"
"""What the one model is called where the settings name none."""
_SEEDS = 2**64
_REQUEST = 400
_TOGETHER = 4
"""So many times the longest prompt the prompts of an answer may be together: each goes to the bus with each choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """What is wanted of each choice, and how the answer shall look."""

    model: str
    prompts: Sequence[Sequence[int]]
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignores_end: bool = False
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

    def generate(self, index: int) -> Generate:
        """Return what is asked of the bus for a choice."""
        sampling = SamplingParameters(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=None if self.seed is None else (self.seed + index) % _SEEDS,
            stop=self.stop,
            ignore_end_token=self.ignores_end,
        )
        return Generate(
            model="" if self.model == DEFAULT_MODEL else self.model,
            tokens=TokenPrompt(token_ids=self.prompts[index // self.n]),
            sampling=sampling,
            top_logprobs=self.top_logprobs,
            include_draft_logprobs=self.wants_drafts,
        )


class Reader:
    """Reads bodies into what they ask for, or an ApiError that names the field."""

    def __init__(self, settings: GatewaySettings, vocabulary: Vocabulary) -> None:
        """Take the bounds, and who makes tokens of texts."""
        self._settings = settings
        self._vocabulary = vocabulary
        self.models = tuple(filter(None, map(str.strip, settings.models.split(",")))) or (DEFAULT_MODEL,)
        """The models that may be asked for."""

    def completion(self, body: Any, table: Table) -> CompletionRequest:  # noqa: ANN401 - JSON
        """Read what /v1/completions is asked."""
        values = _read(table, body)
        given = values["prompt"]
        many = isinstance(given, list) and not isinstance(given[0], int)
        prompts = self._prompts(given if many else [given], values["n"], "prompt")
        drafts = values["include_draft_logprobs"]
        if drafts and values["logprobs"] is None:
            raise _refused("include_draft_logprobs", "only with logprobs, got true without")
        asked = CompletionRequest(
            prompts=prompts, top_logprobs=values["logprobs"], max_tokens=values["max_tokens"], **self._common(values)
        )
        return self._held(asked)

    def chat(self, body: Any, table: Table) -> CompletionRequest:  # noqa: ANN401 - JSON
        """Read what /v1/chat/completions is asked."""
        values = _read(table, body)
        top = values["top_logprobs"]
        if top is not None and not values["logprobs"]:
            raise _refused("top_logprobs", f"only with logprobs: true, got {top} without")
        if values["include_draft_logprobs"] and not values["logprobs"]:
            raise _refused("include_draft_logprobs", "only with logprobs: true, got true without")
        newer, older = values["max_completion_tokens"], values["max_tokens"]
        if newer is not None and older is not None and newer != older:
            raise _refused("max_tokens", f"the same as max_completion_tokens, {newer}, or absent, got {older}")
        prompt = prompt_of(values["messages"], self._settings.chat_template)
        asked = CompletionRequest(
            prompts=self._prompts([prompt], values["n"], "messages"),
            top_logprobs=(top or 0) if values["logprobs"] else None,
            max_tokens=older if newer is None else newer,
            is_chat=True,
            **self._common(values),
        )
        return self._held(asked)

    def inspection(self, body: Any, table: Table) -> CompletionRequest:  # noqa: ANN401 - JSON
        """Read what /inspect is asked."""
        values = _read(table, body)
        return CompletionRequest(
            model=self.models[0],
            prompts=[self._prompt(values["prompt"], "prompt")],
            max_tokens=values["max_tokens"],
            top_logprobs=values["top_logprobs"],
            wants_drafts=values["drafts"],
            is_streamed=True,
            **_sampling(values),
        )

    def _common(self, values: dict[str, Any]) -> dict[str, Any]:
        model = values["model"]
        if model not in self.models:
            known = ", ".join(self.models)
            message = f"model: one of {known}, got {model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        options = values["stream_options"]
        if options is not None and not values["stream"]:
            raise _refused("stream_options", "only where stream is true, got it without")
        return {
            "model": model,
            "n": values["n"],
            "ignores_end": values["ignore_eos"],
            "wants_drafts": values["include_draft_logprobs"],
            "wants_ids": values["return_token_ids"],
            "wants_columns": values["return_columns"],
            "is_streamed": values["stream"],
            "wants_usage": options is not None and options["include_usage"],
            **_sampling(values),
        }

    def _held(self, asked: CompletionRequest) -> CompletionRequest:
        most = self._settings.max_choices
        if asked.choices > most:
            raise _refused("n", f"at most {most} choices, got {asked.choices}: {len(asked.prompts)} prompts times n")
        return asked

    def _prompts(self, given: Sequence[str | list[int]], n: int, name: str) -> list[list[int]]:
        most, tokens, prompts = _TOGETHER * self._settings.max_prompt_tokens, 0, []
        for each in given:
            prompts.append(self._prompt(each, name))
            tokens += n * len(prompts[-1])
            if tokens > most:
                raise _refused(name, f"at most {most} tokens together, each prompt n times, got {tokens} or more")
        return prompts

    def _prompt(self, given: str | list[int], name: str) -> list[int]:
        most = self._settings.max_prompt_tokens
        if not isinstance(given, str):
            return given
        least = self._vocabulary.least_tokens(len(given))
        if least > most:  # then its tokens need not be counted
            raise _refused(name, f"at most {most} tokens, got at least {least}")
        ids = self._vocabulary.encode(given)
        if not 1 <= len(ids) <= most:
            raise _refused(name, f"1 to {most} tokens, got {len(ids)}")
        return ids


def _sampling(values: dict[str, Any]) -> dict[str, Any]:
    stop = values["stop"] or ()
    return {
        "temperature": values["temperature"],
        "top_p": values["top_p"],
        "seed": values["seed"],
        "stop": (stop,) if isinstance(stop, str) else tuple(stop),
    }


def _read(table: Table, body: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    try:
        return table.read(body, "")
    except FieldError as error:
        raise ApiError(_REQUEST, str(error), param=error.where or None, code="invalid_value") from None


def _refused(name: str, what: str) -> ApiError:
    return ApiError(_REQUEST, f"{name}: {what}", param=name, code="invalid_value")
