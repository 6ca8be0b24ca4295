"""SGLang's /generate: its body, and the completion that it is."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from tokenbus_services.gateway.bodies import (
    MOST_MASKED,
    MOST_NAMED,
    Body,
    Completion,
    FormText,
    Ignored,
    Int64,
    Interval,
    Label,
    Name,
    Null,
    Pattern,
    Penalty,
    Repetition,
    Share,
    Stop,
    Stops,
    StructuredOutputs,
    Temperature,
    Text,
    TopK,
    TopP,
    Word,
    only,
    says,
)
from tokenbus_services.gateway.validation import invalid

_TOKENS = 128
"""The default of `max_new_tokens`, as in SGLang."""


class SlimeParams(Body, kw_only=True):
    """What slime's patch of SGLang takes."""

    return_top_p_token_ids: Annotated[bool | None, says("Adds which tokens each was chosen from, in two arrays.")] = (
        False
    )


class SglangSampling(Body, kw_only=True):
    """How tokens are chosen, as SGLang's sampling parameters have it."""

    max_new_tokens: Annotated[int | None, says("The most tokens; null: all that fit.")] = _TOKENS
    min_new_tokens: Annotated[int | None, says("The least tokens before a stop ends an answer.")] = None
    n: Annotated[int | None, says("How many answers each prompt has.")] = 1
    temperature: Annotated[Temperature | None, says("Divides the logits; 0: always the most probable token.")] = None
    top_p: Annotated[TopP | None, says("The probability mass that is kept.")] = None
    top_k: Annotated[TopK | None, says("How many of the most probable tokens are kept; -1: all.")] = None
    min_p: Annotated[Share | None, says("The least share of the top probability kept.")] = None
    presence_penalty: Annotated[Penalty | None, says("What tokens lose that the output has already.")] = None
    frequency_penalty: Annotated[Penalty | None, says("What tokens lose each time that the output has them.")] = None
    repetition_penalty: Annotated[Repetition | None, says("Divides the logits of tokens that were there.")] = None
    sampling_seed: Annotated[Int64 | None, says("Makes sampling repeatable; answer i of a prompt uses it + i.")] = None
    stop: Annotated[Stop | Stops | None, says("Texts that end the answer, and are cut off.")] = None
    stop_token_ids: Annotated[list[int] | None, says("Tokens that end the answer, whose text is cut off.")] = None
    no_stop_trim: Annotated[bool | None, says("Whether the stop that ends an answer is in its text.")] = False
    ignore_eos: Annotated[bool | None, says("Generates past the model's own end of text.")] = False
    skip_special_tokens: Annotated[bool | None, says("Whether special tokens are left out of the text.")] = True
    logit_bias: Annotated[Any, says("Added to tokens' logits, by token id.")] = None
    json_schema: Annotated[FormText | None, says("A JSON Schema of the output, as a text.")] = None
    regex: Annotated[Pattern | None, says("A regular expression that matches the output.")] = None
    ebnf: Annotated[FormText | None, says("A grammar, as the engine reads it.")] = None
    structural_tag: Annotated[FormText | None, says("Marks, and the forms behind them, as a text.")] = None
    spaces_between_special_tokens: Ignored = None
    stream_interval: Annotated[Interval | None, says("After how many tokens a stream has a chunk.")] = None
    stop_regex: Null = None
    custom_params: Annotated[SlimeParams | None, says("What slime adds to SGLang.")] = None


class SglangGenerate(Body, kw_only=True):
    """A body of /generate."""

    rid: Annotated[Label | list[Label] | None, says("What the answer's id is; several prompts may have one each.")] = (
        None
    )
    input_ids: Annotated[Any, says("A prompt's token ids, or those of several; either this or text.")] = None
    text: Annotated[Text | list[Text] | None, says("A prompt's text, or several; either this or input_ids.")] = None
    sampling_params: Annotated[SglangSampling | None, says("How tokens are chosen.")] = None
    return_logprob: Annotated[bool | None, says("Whether tokens have their logprobs.")] = False
    logprob_start_len: Annotated[int | None, says("Where in the prompt logprobs begin; -1: behind it.")] = None
    top_logprobs_num: Annotated[int | None, says("How many alternatives each token has.")] = None
    token_ids_logprob: Annotated[list[int] | None, says("Tokens whose logprobs each position has.")] = None
    return_text_in_logprobs: Annotated[bool | None, says("Whether logprobs have tokens' texts.")] = False
    stream: Annotated[bool | None, says("Whether the answer is sent as server-sent events.")] = False
    lora_path: Annotated[Name | None, says("The name of an adapter, or of a model, that /v1/models lists.")] = None
    cache_salt: Annotated[Word | None, says("Prompts' states are shared within one salt.")] = None
    return_hidden_states: Annotated[Any, only("return_hidden_states")] = None
    return_routed_experts: Annotated[Any, only("return_routed_experts")] = None
    return_sampling_mask: Annotated[bool | None, says("Whether each token has those that could have been chosen.")] = (
        False
    )
    sampling_logprobs_mode: Annotated[Any, only("sampling_logprobs_mode")] = None
    return_entropy: Annotated[Any, only("return_entropy")] = None
    return_indexer_topk: Annotated[Any, only("return_indexer_topk")] = None
    return_flat_raw_top_logprobs: Annotated[Any, only("return_flat_raw_top_logprobs")] = None
    return_prompt_token_ids: Annotated[Any, only("return_prompt_token_ids")] = None
    session_id: Ignored = None
    routing_key: Ignored = None
    conversation_id: Ignored = None
    log_metrics: Ignored = None
    no_logs: Ignored = None
    custom_labels: Ignored = None


_SAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "logit_bias"),
)
_RENAMED = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}
_FORMS = {"json": "json_schema", "regex": "regex", "grammar": "ebnf", "structural_tag": "structural_tag"}
"""By vLLM's name of a form SGLang's."""
FIELDS: Mapping[str, str] = {
    **{name: f"sampling_params.{name}" for name in _SAME},
    **{name: f"sampling_params.{other}" for name, other in _RENAMED.items()},
    **{f"structured_outputs.{name}": f"sampling_params.{other}" for name, other in _FORMS.items()},
    "structured_outputs": "sampling_params",
    "prompt": "input_ids",
    "model": "lora_path",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "logprob_start_len",
    "prompt_logprob_token_ids": "token_ids_logprob",
    "return_logprobs_of": "token_ids_logprob",
    "return_mask": "return_sampling_mask",
    "return_other_logprobs": "return_sampling_mask",
}
"""By a completion's field this body's, where they differ."""


def completion_of(body: SglangGenerate) -> Completion:
    """Return the completion that a body is; raises an ApiError that names the body's field."""
    params = body.sampling_params or SglangSampling()
    if (body.input_ids is None) == (body.text is None):
        raise invalid("input_ids", f"either this or text, got {'neither' if body.text is None else 'both'}")
    text = [body.text] if isinstance(body.text, str) else body.text
    forms = {name: value for name, other in _FORMS.items() if (value := getattr(params, other)) is not None}
    if len(forms) > 1:
        names = (", ".join(_FORMS[name] for name in each) for each in (_FORMS, forms))
        raise invalid("sampling_params", "at most one of {}, got {}".format(*names))
    has_masks = params.max_new_tokens != 0 and (body.return_sampling_mask or wants_top_p(body))
    return Completion(
        model=body.lora_path,
        prompt=text or body.input_ids,
        logprobs=(body.top_logprobs_num or 0) if body.return_logprob or has_masks else None,
        return_other_logprobs=has_masks,
        return_mask=MOST_MASKED if has_masks else None,
        structured_outputs=StructuredOutputs(**forms) if forms else None,
        return_token_ids=True,
        stream=body.stream,
        cache_salt=body.cache_salt,
        **{name: getattr(params, name) for name in _SAME} | {"n": params.n or 1},
        **{name: getattr(params, other) for name, other in _RENAMED.items()},
        **_scoring(body, params),
    )


def wants_top_p(body: SglangGenerate) -> bool:
    """Tell whether an answer has slime's arrays of the tokens that could have been chosen."""
    custom = body.sampling_params and body.sampling_params.custom_params
    return bool(custom and custom.return_top_p_token_ids)


def _scoring(body: SglangGenerate, params: SglangSampling) -> dict[str, Any]:
    """Return what a body wants to be known of its prompts' tokens and of given ones, by a completion's names."""
    named = body.token_ids_logprob
    if not body.return_logprob:
        return {}
    scores_prompt, generates = body.logprob_start_len not in (None, -1), params.max_new_tokens != 0
    if named is not None and not (scores_prompt or generates):
        raise invalid("token_ids_logprob", "only where tokens are generated or logprob_start_len is at least 0, got it")
    if named is not None and scores_prompt and body.top_logprobs_num:
        where = "only with top_logprobs_num 0 where logprob_start_len is at least 0"
        raise invalid("token_ids_logprob", f"{where}, got {body.top_logprobs_num}")
    if named is not None and generates and len(named) > MOST_NAMED:
        raise invalid("token_ids_logprob", f"at most {MOST_NAMED} where tokens are generated, got {len(named)}")
    wanted: dict[str, Any] = {"return_logprobs_of": named if generates else None}
    if scores_prompt:
        wanted |= {"prompt_logprob_token_ids": named} if named else {"prompt_logprobs": body.top_logprobs_num or 0}
    return wanted


def ids_of(body: SglangGenerate, prompts: Sequence[object]) -> list[str]:
    """Return the ids of the answers to several prompts, where the body has one for each; else nothing."""
    if not isinstance(body.rid, list):
        return []
    if len(body.rid) != len(prompts):
        raise invalid("rid", f"one for each of {len(prompts)} prompts, got {len(body.rid)}")
    return body.rid
