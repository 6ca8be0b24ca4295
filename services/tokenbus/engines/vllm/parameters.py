"""Parameters: converts a request to the arguments of vLLM's SamplingParams."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from tokenbus.engines.admission import check_ids
from tokenbus.engines.prompt_scoring import check_scoring
from tokenbus.engines.vllm.token_scores import ASKED, GIVEN, as_argument
from tokenbus_contracts.generated.request_pb2 import Generate, PromptScoring, StructuredOutput

_SEEDS = 2**63
_TRANSFER = "kv_transfer_params"
_PLAIN = frozenset({"str", "int", "float", "bool"})


def _form(output: StructuredOutput) -> dict[str, Any]:
    kind = output.WhichOneof("constraint")
    if kind == "json_schema":
        return {"json": output.json_schema.schema}
    if kind == "json_object":
        return {"json_object": True}
    if kind == "choice":
        return {"choice": list(output.choice.texts)}
    if kind == "structural_tag":
        return {"structural_tag": output.structural_tag.tag}
    return {"regex": output.regex.pattern} if kind == "regex" else {"grammar": output.grammar.text}


def _arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of vLLM's extensions. As in vLLM's server, values are plain or lists of plain values."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"sampling.engine_arguments: JSON, got an error: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"sampling.engine_arguments: a JSON object, got {type(found).__name__}")  # noqa: TRY004
    for name, value in found.items():
        others = {type(each).__name__ for each in (value if isinstance(value, list) else [value])} - _PLAIN
        if others:
            got = ", ".join(sorted(others))
            raise ValueError(f"sampling.engine_arguments.{name}: a text, a number or a list of these, got {got}")
    return found


_PARAMETERS = {
    **{name: name for name in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")},
    **{name: name for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")},
    "ignore_end_token": "ignore_eos",
    "include_stop_string": "include_stop_str_in_output",
    "include_special_tokens": "skip_special_tokens",
    "structured_output": "structured_outputs",
    "engine_arguments": "extra_args",
}
"""vLLM's name of each of our fields. Fields that are neither in this table nor in BESIDE are refused."""
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "seed": lambda seed: seed % _SEEDS,  # vLLM's seed is signed, and -1 means no seed
    "logit_bias": lambda biases: {each.token_id: each.bias for each in biases},
    "include_special_tokens": lambda included: not included,
    "structured_output": _form,
    "engine_arguments": _arguments,
}
"""Functions that convert fields to vLLM's form, for fields whose form differs."""
BESIDE = frozenset({"cache_salt", "lora_adapter", "priority"})
"""Fields that are not part of vLLM's SamplingParams."""
_OF_OUTPUT = ("structured_outputs", "presence_penalty", "frequency_penalty", "bad_words")
"""Arguments that depend on the whole output. vLLM does not know the whole output of a continued request."""
SAMPLING_ARGUMENTS = (*_PARAMETERS.values(), "logprobs", "prompt_logprobs")
"""All arguments of SamplingParams that Tokenbus passes."""


def sampling_arguments(
    generate: Generate,
    defaults: Mapping[str, Any],
    *,
    vocabulary_size: int,
    top_logprobs: int,
    has_token_scores: bool = False,
) -> dict[str, Any]:
    """Return the arguments of SamplingParams, based on the model's defaults, or raise ValueError."""
    if not generate.request_id:
        raise ValueError("request_id: at least 1, got 0")
    if generate.include_draft_logprobs:
        raise ValueError("include_draft_logprobs: vLLM has no logprobs of drafts, got true")
    most = min(top_logprobs, vocabulary_size)
    if generate.top_logprobs > most:
        raise ValueError(f"top_logprobs: at most {most}, got {generate.top_logprobs}")
    check_ids("sampling.stop_token_ids", generate.sampling.stop_token_ids, vocabulary_size)
    # vLLM's default would be 16 tokens.
    arguments: dict[str, Any] = {"max_tokens": None, **defaults}
    for field, value in generate.sampling.ListFields():
        if field.name in BESIDE:
            continue
        if field.name not in _PARAMETERS:
            raise ValueError(f"sampling.{field.name}: not supported by the engine vllm")
        convert = _CONVERSIONS.get(field.name, list if field.is_repeated else None)
        arguments[_PARAMETERS[field.name]] = convert(value) if convert else value
    _shorten(arguments, generate)
    if generate.HasField("top_logprobs"):
        arguments["logprobs"] = generate.top_logprobs
    if generate.HasField("prompt_scoring"):
        check_scoring(generate, vocabulary_size, most)
        arguments |= _of_prompt(generate.prompt_scoring, has_token_scores=has_token_scores)
    if extra := _extra_arguments(generate, arguments.get("extra_args") or {}) | _transfer(generate):
        arguments["extra_args"] = extra
    return arguments


def begin_only(arguments: dict[str, Any]) -> bool:
    """Limit a request to one token, and keep its cache. Return whether a decode worker must continue the request."""
    if arguments["max_tokens"] == 1:
        return False
    arguments |= {"max_tokens": 1, "min_tokens": min(1, arguments.get("min_tokens") or 0)}
    kept = {_TRANSFER: {"do_remote_decode": True, "do_remote_prefill": False}}
    arguments["extra_args"] = kept | (arguments.get("extra_args") or {})
    return True


def _shorten(arguments: dict[str, Any], generate: Generate) -> None:
    """Subtract the continued tokens from the token limits, because vLLM counts these tokens as part of the prompt."""
    if not generate.continuation.token_ids:
        return
    for name in _OF_OUTPUT:
        if arguments.get(name):
            raise ValueError(f"continuation: none with {name}, which vLLM counts from the output's first token")
    accepted = len(generate.continuation.token_ids)
    if (most := arguments["max_tokens"]) is not None:
        if accepted >= most:
            raise ValueError(f"continuation.token_ids: fewer than the {most} of max_tokens, got {accepted}")
        arguments["max_tokens"] = most - accepted
    arguments["min_tokens"] = max(0, (arguments.get("min_tokens") or 0) - accepted)


def _of_prompt(asked: PromptScoring, *, has_token_scores: bool) -> dict[str, Any]:
    if asked.token_ids and not has_token_scores:
        raise ValueError(f"prompt_scoring.token_ids: none without --token-scores, got {len(asked.token_ids)}")
    # vLLM must generate at least one token, which the worker drops.
    return {"prompt_logprobs": asked.top_logprobs, **({"max_tokens": 1} if asked.without_generation else {})}


def _transfer(generate: Generate) -> dict[str, Any]:
    """Return the parameters with which vLLM's connector finds the prefill worker's cache."""
    state = generate.continuation.transfer_state
    try:
        return {_TRANSFER: json.loads(state)} if state else {}
    except ValueError as error:
        raise ValueError(f"continuation.transfer_state: JSON, got an error: {error}") from None


def _extra_arguments(generate: Generate, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for vLLM's extensions and our sampler."""
    for name in (ASKED, GIVEN, _TRANSFER):
        if name in given:
            raise ValueError(f"sampling.engine_arguments.{name}: only the worker may set it")
    extra = dict(given)
    if generate.HasField("token_scoring"):
        extra[ASKED] = as_argument(generate.token_scoring)
    if generate.prompt_scoring.token_ids:
        extra[GIVEN] = list(generate.prompt_scoring.token_ids)
    return extra
