"""RequestParameters: the keyword arguments of a request, and their conversion into a message."""

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import FieldDescriptor

from tokenbus_contracts import ContractError, Rule
from tokenbus_contracts.generated.request_pb2 import ContinuationPolicy, Generate, SamplingParameters

Ids = npt.NDArray[np.integer[Any]]
"""Token ids as an array."""
Prompt = str | Sequence[int] | Ids
"""A text, or a sequence of token ids."""


class StructuredOutput(TypedDict, total=False):
    """The required form of an output's text, as a dict with exactly one key.

    Example:
        form: tokenbus.StructuredOutput = {"choice": ["yes", "no"]}
        wanted: tokenbus.RequestParameters = {"max_tokens": 8, "structured_output": form}
    """

    json_schema: str | Mapping[str, Any]
    """JSON that matches a JSON Schema, which is given as JSON text or as an object."""
    json_object: bool
    """Any JSON object; the only valid value is True."""
    regex: str
    """A regular expression that must match the whole text."""
    choice: Sequence[str]
    """The allowed texts."""
    grammar: str
    """A context-free grammar of the text, in a notation that the engine supports, such as EBNF."""
    structural_tag: str | Mapping[str, Any]
    """vLLM's structural tag for the form of marked parts of the text, as JSON text or as an object."""


class RequestParameters(TypedDict, total=False):
    """The keyword arguments of `Client.generate` and `Client.submit`; None has the same effect as no argument.

    Example:
        wanted: tokenbus.RequestParameters = {"max_tokens": 8, "top_logprobs": 2, "stop": "."}
        async with tokenbus.connect(address) as client:
            async for token in client.generate([1, 2, 3], **wanted):
                print(token.id, token.logprob)
    """

    max_tokens: int | None
    """Limit on generated tokens, at least 1; default: as many as the context allows."""
    temperature: float | None
    """Divisor of the logits, at least 0; 0 always selects the most probable token; default: the worker's setting."""
    top_p: float | None
    """Probability mass of the tokens to sample from, greater than 0 and at most 1; default: the worker's setting."""
    top_k: int | None
    """Number of most probable tokens to sample from; the default, 0, allows all tokens."""
    seed: int | None
    """Seed for repeatable sampling, from 0 to 2**64 - 1; default: sampling is not repeatable."""
    stop: str | Sequence[str] | None
    """At most 16 texts that end the request; default: none."""
    stop_token_ids: Sequence[int] | Ids | None
    """At most 1024 tokens that end the request besides the model's end token; default: none."""
    ignore_end_token: bool | None
    """Whether the request goes on after the model's end token; default: False."""
    min_p: float | None
    """Minimum probability of a token, as a fraction of the highest probability; default: the worker's setting."""
    presence_penalty: float | None
    """Value from -2 to 2 subtracted from the logits of tokens in the output; default: the worker's setting."""
    frequency_penalty: float | None
    """Value from -2 to 2 subtracted from a token's logit per occurrence in an output; default: the worker's setting."""
    repetition_penalty: float | None
    """Positive factor for tokens of the prompt and the output: it divides positive logits and multiplies negative
    logits. The value 1 has no effect; default: the worker's setting."""
    logit_bias: Mapping[int, float] | None
    """Values from -100 to 100 that are added to the logits of at most 1,024 token ids; default: none."""
    min_tokens: int | None
    """Minimum number of tokens before a stop token or an end token ends the request; default: 0."""
    bad_words: str | Sequence[str] | None
    """At most 256 texts that the output must not contain; default: none."""
    allowed_token_ids: Sequence[int] | Ids | None
    """The only tokens that may be sampled, at most 65,536; default: all tokens."""
    include_stop_string: bool | None
    """Whether detokenized output includes the stop text that ended it; default: False."""
    include_special_tokens: bool | None
    """Whether `stop` also matches the texts of special tokens; default: False."""
    structured_output: StructuredOutput | None
    """Required form of the output's text; default: any text."""
    lora_adapter: str | None
    """Name of a LoRA adapter of the worker; default: none."""
    priority: int | None
    """Priority for engines that schedule by priority, where the lowest number is first; default: 0."""
    cache_salt: str | None
    """Prefix cache salt; only requests with equal salts share cached prefixes; default: no salt."""
    engine_arguments: str | Mapping[str, Any] | None
    """Arguments of the engine's extensions, as a JSON object or its text; default: none."""
    top_logprobs: int | None
    """Alternatives per token, at most 127; 0 returns only the token's logprob and rank; default: token ids only."""
    other_logprobs: bool | None
    """Whether tokens have both the model's and the sampler's logprob instead of only one; default: False."""
    entropies: bool | None
    """Whether each token has the entropy of its distribution; default: False."""
    logprob_token_ids: Sequence[int] | Ids | None
    """At most 128 tokens whose logprobs are also returned for each position; default: none."""
    mask_bound: int | None
    """Size of the largest sampling mask whose token ids are returned, at most 1,024; default: no masks.

    For a larger mask, only its size is returned.
    """
    prompt_logprobs: int | None
    """Number of alternatives per prompt token, at most 127, besides the token's own logprob and rank; default: no
    prompt scores. With `max_tokens=0` the engine only scores the prompt."""
    prompt_logprob_token_ids: Sequence[int] | Ids | None
    """At most 256 alternatives to score at each prompt token; default: the most probable tokens."""
    prompt_logprob_start: int | None
    """First scored position of the prompt; default: 1, because the first token has no score."""
    include_draft_logprobs: bool | None
    """Whether `Client.steps` includes the proposals of the draft model; default: False."""
    model: str | None
    """Name of the requested model; default: the only model."""
    deadline_ms: int | None
    """Time limit of the request from now, in milliseconds; default: the processor's limit."""
    deadline_unix_ms: int | None
    """Deadline of the request, in milliseconds since 1970-01-01 UTC; default: none."""
    session: str | None
    """Label of requests that belong together, at most 128 bytes; their prompts are recorded; default: none."""
    parent: int | None
    """Id of the preceding request in the same session; default: unknown."""
    tenant: int | None
    """Id of the user for whom this client asks, whose sessions are separate; default: 0, the client itself."""
    request_id: int | None
    """Id of the request, from 1 to 2**64 - 1; default: a random id."""
    continuation: str | None
    """Behaviour when the worker is lost; default: "any", which lets another worker continue from the accepted tokens.
    "same_weights" requires a worker with the weights of the last token; "off" ends the request with an error."""


def request_of(prompt: Prompt, parameters: Mapping[str, object]) -> Generate:
    """Return the request that a prompt and keyword arguments describe.

    Raises ContractError with the argument, the limit and the value for an unknown name or a value of the wrong type.
    The bounds of the schema are checked when the request is encoded.
    """
    generate = Generate()
    generate.sampling.SetInParent()
    if isinstance(prompt, str):
        generate.text.text = prompt
    else:
        generate.tokens.token_ids[:] = _prompt_ids(prompt)
    for name, value in parameters.items():
        if name not in RequestParameters.__annotations__:
            raise ContractError(name, f"a parameter of a request{_alike(name)}", value, rule=Rule.NAMED)
        if value is not None:
            _set(generate, name, value)
    if generate.HasField("token_scoring") and not generate.HasField("top_logprobs"):
        generate.top_logprobs = 0
    if generate.HasField("prompt_scoring") and generate.sampling.HasField("max_tokens"):
        generate.prompt_scoring.without_generation = not generate.sampling.max_tokens
        if generate.prompt_scoring.without_generation:
            generate.sampling.ClearField("max_tokens")
    return generate


def named_as_given(error: ContractError) -> ContractError:
    """Return an error about a request's frame with the argument's name instead of the field's path."""
    field = error.field.removeprefix("generate.")
    for path, name in _ARGUMENTS.items():
        if field.startswith(path):
            field = name + field.removeprefix(path)
    return ContractError(field, error.limit, error.actual, rule=error.rule)


CONTINUATIONS = {
    "any": ContinuationPolicy.CONTINUATION_POLICY_UNSPECIFIED,
    "same_weights": ContinuationPolicy.CONTINUATION_POLICY_SAME_WEIGHTS,
    "off": ContinuationPolicy.CONTINUATION_POLICY_OFF,
}
"""Policies for a request that loses its worker, by name."""
_PATHS = {
    "request_id": "request_id",
    "continuation": "continuation_policy",
    "other_logprobs": "token_scoring.other_logprobs",
    "entropies": "token_scoring.entropies",
    "logprob_token_ids": "token_scoring.token_ids",
    "mask_bound": "token_scoring.mask_bound",
    "prompt_logprobs": "prompt_scoring.top_logprobs",
    "prompt_logprob_token_ids": "prompt_scoring.token_ids",
    "prompt_logprob_start": "prompt_scoring.first_position",
    **{name: f"sampling.{name}" for name in SamplingParameters.DESCRIPTOR.fields_by_name},
}
"""Field paths in Generate, by argument; for all other arguments, the path is the argument's name."""
_ARGUMENTS = {"text.text": "prompt", "tokens.token_ids": "prompt"} | {path: name for name, path in _PATHS.items()}


def _field_of(name: str) -> tuple[str, Any]:
    owner, _, field = _PATHS.get(name, name).rpartition(".")
    message: Any = getattr(Generate(), owner) if owner else Generate
    return owner, message.DESCRIPTOR.fields_by_name[field]


_FIELDS: dict[str, tuple[str, Any]] = {name: _field_of(name) for name in RequestParameters.__annotations__}
"""For each argument, the name of a submessage of Generate, or empty for Generate itself, and the field in it."""


def _prompt_ids(prompt: Sequence[int] | Ids) -> Sequence[int]:
    ids = prompt.tolist() if isinstance(prompt, np.ndarray) else prompt
    if isinstance(ids, (bytes, bytearray)) or not isinstance(ids, Sequence):
        raise ContractError("prompt", "a text or a sequence of token ids", type(prompt).__name__, rule=Rule.TYPE)
    if not ids:
        raise ContractError("prompt", "at least 1 token id", "none", rule=Rule.LENGTH)
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < 1 << 32:  # 20 times as fast as the slow path below
        return ids
    return [_whole(f"prompt[{place}]", value) for place, value in enumerate(ids)]


def _set(generate: Generate, name: str, value: object) -> None:
    if name in _WRITERS:
        _WRITERS[name](generate, value)
        return
    owner, field = _FIELDS[name]
    message = getattr(generate, owner) if owner else generate
    read = _json if name == "engine_arguments" else _READERS[field.type]
    if field.is_repeated:
        getattr(message, field.name).extend(_each(name, value, read))
    elif (found := read(name, value)) or owner != "token_scoring":  # a False flag does not ask for scoring
        setattr(message, field.name, found)
    if owner == "prompt_scoring":
        message.SetInParent()


def _each(name: str, value: object, read: Callable[[str, Any], object]) -> Iterator[Any]:
    values = [value] if isinstance(value, str) else value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(values, Sequence) or isinstance(values, (bytes, bytearray)):
        raise ContractError(name, "a sequence", type(value).__name__, rule=Rule.TYPE)
    yield from (read(f"{name}[{place}]", each) for place, each in enumerate(values))


def _set_logit_bias(generate: Generate, value: object) -> None:
    if not isinstance(value, Mapping):
        raise ContractError("logit_bias", "a mapping of token ids to numbers", type(value).__name__, rule=Rule.TYPE)
    for place, (token_id, bias) in enumerate(value.items()):
        here = f"logit_bias[{place}]"
        generate.sampling.logit_bias.add(
            token_id=_whole(f"{here}.token_id", token_id), bias=_number(f"{here}.bias", bias)
        )


def _set_structured_output(generate: Generate, value: object) -> None:
    forms = StructuredOutput.__annotations__
    if not isinstance(value, Mapping) or len(value) != 1 or not forms.keys() >= value.keys():
        given = ", ".join(map(str, value)) or "none" if isinstance(value, Mapping) else type(value).__name__
        raise ContractError("structured_output", f"one of {', '.join(forms)}", given, rule=Rule.NAMED)
    ((form, given),) = value.items()
    name, output = f"structured_output.{form}", generate.sampling.structured_output
    if form in _FORMS:
        field, read = _FORMS[form]
        setattr(getattr(output, form), field, read(name, given))
    elif form == "json_object":
        if not _flag(name, given):
            raise ContractError(name, "True", given, rule=Rule.NAMED)
        output.json_object.SetInParent()
    else:
        output.choice.texts.extend(_each(name, given, _text))
        if not output.choice.texts:
            raise ContractError(name, "at least 1 text", "none", rule=Rule.LENGTH)


def _set_continuation(generate: Generate, value: object) -> None:
    policy = CONTINUATIONS.get(value) if isinstance(value, str) else None
    if policy is None:
        raise ContractError("continuation", f"one of {', '.join(CONTINUATIONS)}", value, rule=Rule.NAMED)
    generate.continuation_policy = policy


_WRITERS: dict[str, Callable[[Generate, object], None]] = {
    "continuation": _set_continuation,
    "logit_bias": _set_logit_bias,
    "structured_output": _set_structured_output,
}
"""Functions that write arguments other than plain values and lists of plain values."""


def _json(name: str, value: object) -> str:
    if not isinstance(value, Mapping):
        return str(_text(name, value))
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ContractError(name, "a value for JSON", str(error), rule=Rule.TYPE) from None


def _whole(name: str, value: object, bits: int = 32, low: int = 0) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Integral):
        raise ContractError(name, "a whole number", value, rule=Rule.TYPE)
    number = int(value)
    if number < low:
        raise ContractError(name, low, number, rule=Rule.MIN)
    if number >= 1 << bits:
        raise ContractError(name, (1 << bits) - 1, number, rule=Rule.MAX)
    return number


def _reader(kinds: Any, make: Callable[[Any], Any], phrase: str) -> Callable[[str, Any], Any]:  # noqa: ANN401
    def read(name: str, value: object) -> Any:  # noqa: ANN401
        if not isinstance(value, kinds) or (isinstance(value, (bool, np.bool_)) and make is not bool):
            raise ContractError(name, phrase, value, rule=Rule.TYPE)
        return make(value)

    return read


_number = _reader(Real, float, "a number")
_flag = _reader((bool, np.bool_), bool, "True or False")
_text = _reader(str, str, "a text")
_FORMS: dict[str, tuple[str, Callable[[str, Any], str]]] = {
    "json_schema": ("schema", _json),
    "regex": ("pattern", _text),
    "grammar": ("text", _text),
    "structural_tag": ("tag", _json),
}
"""Field and parsing function for each form of structured output."""
_READERS: dict[int, Callable[[str, Any], object]] = {
    FieldDescriptor.TYPE_UINT32: _whole,
    FieldDescriptor.TYPE_FIXED32: _whole,
    FieldDescriptor.TYPE_FIXED64: lambda name, value: _whole(name, value, 64),
    FieldDescriptor.TYPE_SINT64: lambda name, value: _whole(name, value, 63, low=-(2**63)),
    FieldDescriptor.TYPE_FLOAT: _number,
    FieldDescriptor.TYPE_BOOL: _flag,
    FieldDescriptor.TYPE_STRING: _text,
}


def _alike(name: str) -> str:
    names = RequestParameters.__annotations__
    found = difflib.get_close_matches(name, names, n=1)
    return f", as {found[0]}" if found else f": {', '.join(names)}"
