"""Requests: what one call of `LLM.generate` asks for, checked before the first request is sent."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tokenbus_contracts import ContractError, Rule
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.client_pb2 import ClientFrame
from tokenbus_contracts.generated.request_pb2 import Generate, RequestError
from tokenbus_services.client import RequestFailedError, RequestParameters
from tokenbus_services.client.parameters import Prompt, named_as_given, request_of, set_prompt
from tokenbus_services.delivery.stop_strings import Stopping

Parameters = RequestParameters | Sequence[RequestParameters] | None
_SEEDS = 2**64
_MOST_SAMPLES = 1024
_REFUSED = ("request_id", "include_draft_logprobs")
"""Parameters of a request that a call does not have: ids are drawn here, and drafts are no outputs."""


class EngineLimits(NamedTuple):
    """What is known before the engine has a request."""

    vocabulary_size: int
    max_model_tokens: int
    """The most tokens of a prompt and its output together; 0: not known."""
    max_top_logprobs: int


class Requests:
    """The requests of a call, `n` for each prompt, with ids that follow one another; each is made when it is sent."""

    def __init__(
        self, prompts: str | Iterable[Prompt], parameters: Parameters, common: Mapping[str, Any], n: int
    ) -> None:
        """Take the prompts, the parameters of all or of each, and those that the others leave open.

        Raises ContractError, a ValueError, for what is wrong with the parameters that all have in common.
        """
        if type(n) is not int or not 1 <= n <= _MOST_SAMPLES:
            raise ContractError("n", f"a whole number from 1 to {_MOST_SAMPLES}", n)
        if isinstance(prompts, Mapping) or not hasattr(prompts, "__iter__"):
            raise ContractError("prompts", "a sequence of prompts", type(prompts).__name__, rule=Rule.TYPE)
        self.n = n
        self.first_id = 1 + secrets.randbits(63)
        self._prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        self._each: list[Any] | None = None
        self._common = dict(common)
        if isinstance(parameters, Sequence) and not isinstance(parameters, str):
            self._each = list(parameters)
        else:
            self._common |= _mapping("parameters", parameters)
        if self._each is not None and len(self._each) != len(self._prompts):
            raise ContractError("parameters", f"{len(self._prompts)}, one for each prompt", len(self._each))
        self._shared = self._parsed([0], self._common)

    def __len__(self) -> int:
        """Return how many requests there are."""
        return self.n * len(self._prompts)

    @property
    def stoppings(self) -> list[Stopping]:
        """What ends the outputs' texts, for each prompt, or once for all."""
        if self._each is None:
            return [_stopping(self._shared)]
        return [_stopping(self._parsed([0], self._parameters(place))) for place in range(len(self._prompts))]

    def check(self, limits: EngineLimits) -> None:
        """Raise ContractError for the first request that cannot be sent: its prompt, the limit and the value."""
        for place in range(len(self._prompts)):
            try:
                generate = self.make(place * self.n)
                write_frame(ClientFrame(generate=generate))
                _check_limits(generate, limits)
            except ContractError as error:
                raise self._named(place, named_as_given(error)) from None

    def make(self, index: int) -> Generate:
        """Return a request."""
        place, sample = divmod(index, self.n)
        generate = self._of_prompt(place)
        generate.request_key = self.first_id + index
        if sample and generate.sampling.HasField("seed"):
            generate.sampling.seed = (generate.sampling.seed + sample) % _SEEDS
        return generate

    def failure(self, error: RequestFailedError) -> RequestFailedError:
        """Return the error of a request with its prompt's place."""
        place, sample = divmod(error.request_id - self.first_id, self.n)
        which = f"prompts[{place}]" if self.n == 1 else f"prompts[{place}], sample {sample}"
        named = RequestError(
            request_key=error.request_id,
            code=error.code,
            message=f"{which}: {error.reason}",
            emitted_tokens=error.emitted_tokens,
            retry_after_ms=error.retry_after_ms,
        )
        return RequestFailedError(named, error.generated_tokens)

    def _of_prompt(self, place: int) -> Generate:
        """Return a prompt's request, without its id."""
        if self._each is not None:
            return self._parsed(self._prompts[place], self._parameters(place))
        generate = Generate()
        generate.CopyFrom(self._shared)
        set_prompt(generate, self._prompts[place])
        return generate

    def _parameters(self, place: int) -> Mapping[str, Any]:
        """Return the parameters of a prompt's requests, where each prompt has its own."""
        return {**self._common, **_mapping("", self._each[place] if self._each else None)}

    def _parsed(self, prompt: Prompt, parameters: Mapping[str, Any]) -> Generate:
        for name in _REFUSED:
            if parameters.get(name):
                raise ContractError(name, "none in a call of generate", parameters[name], rule=Rule.NAMED)
        return request_of(prompt, parameters)

    def _named(self, place: int, error: ContractError) -> ContractError:
        """Return an error with the place of its prompt, or of its prompt's parameters."""
        field, head = error.field, f"prompts[{place}]"
        if field == "prompt" or field.startswith("prompt["):
            field = head + field.removeprefix("prompt")
        elif self._each is not None:
            field = f"parameters[{place}].{field}" if field else f"parameters[{place}]"
        return ContractError(field, error.limit, error.actual, rule=error.rule)


def _mapping(field: str, parameters: object) -> Mapping[str, Any]:
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise ContractError(field, "parameters by their names", type(parameters).__name__, rule=Rule.TYPE)
    return parameters


def _check_limits(generate: Generate, limits: EngineLimits) -> None:
    ids, size, most = generate.tokens.token_ids, limits.vocabulary_size, limits.max_model_tokens
    if ids and max(ids) >= size:
        place, wrong = next((at, token_id) for at, token_id in enumerate(ids) if token_id >= size)
        raise ContractError(f"prompt[{place}]", f"below {size}, as the model has tokens", wrong)
    if most and len(ids) >= most:
        raise ContractError("prompt", f"at most {most - 1} tokens, one less than the context", len(ids))
    if generate.top_logprobs > limits.max_top_logprobs:
        raise ContractError("top_logprobs", limits.max_top_logprobs, generate.top_logprobs, rule=Rule.MAX)


def _stopping(generate: Generate) -> Stopping:
    sampling = generate.sampling
    return Stopping(tuple(sampling.stop), sampling.min_tokens, sampling.include_stop_string)
