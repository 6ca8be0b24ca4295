"""Bodies of vLLM's /inference/v1/generate, which are read as completions."""

from collections.abc import Mapping
from typing import Annotated, Literal

from tokenbus.gateway import bodies
from tokenbus.gateway.bodies import Body, Int64, Label, Word, says
from tokenbus.gateway.errors import TOKEN_SCORING


class SamplingParams(bodies.EngineSampling, kw_only=True):
    """vLLM's sampling parameters."""

    n: Annotated[int | None, says("The number of choices in the answer.")] = 1
    max_tokens: Annotated[int | None, says("The maximum number of tokens of a choice; absent: all that fit.")] = None
    logprobs: bodies.Scored = None
    logprob_token_ids: bodies.ScoredIds = None
    prompt_logprobs: bodies.PromptScored = None
    extra_args: Annotated[bodies.EngineArguments | None, says("Arguments of the engine's extensions.")] = None
    detokenize: Annotated[bool | None, says("Whether output_mode may be text.")] = True


class Generate(Body, kw_only=True):
    """A body of /inference/v1/generate."""

    request_id: Annotated[Label | None, says("The answer's id without `generate-tokens-`.")] = None
    model: bodies.Model = None
    token_ids: Annotated[list[int], says("The prompt.")]
    sampling_params: Annotated[SamplingParams, says("How tokens are sampled, and their logprobs.")]
    stream: bodies.Streams = False
    stream_options: Annotated[bodies.StreamOptions | None, says("Only if stream is true.")] = None
    return_token_ids: Annotated[bool | None, says("Adds prompt_token_ids.")] = False
    output_mode: Annotated[Literal["tokens", "text"] | None, says("Whether choices also have their text.")] = "tokens"
    return_other_logprobs: bodies.OtherLogprobs = False
    return_entropies: bodies.Entropies = False
    return_logprobs_of: bodies.LogprobsOf = None
    return_mask: bodies.MaskBound = None
    cache_salt: Annotated[Word | None, says("Only prompts with the same salt share cached states.")] = None
    priority: Annotated[Int64 | None, says("The priority: the lowest comes first; absent: 0.")] = None
    session_id: bodies.SessionId = None


FIELDS: Mapping[str, str] = {
    **{name: f"sampling_params.{name}" for name in SamplingParams.__struct_fields__},
    "prompt": "token_ids",
    "response_format": "sampling_params.structured_outputs",
    "vllm_xargs": "sampling_params.extra_args",
}
"""The fields that this body names differently from a body of completions: the name there, and the name here."""
_BESIDE = ("model", "stream", "stream_options", "cache_salt", "priority", "session_id", "request_id", *TOKEN_SCORING)
_SAMPLING = tuple(name for name in bodies.Completion.__struct_fields__ if name in SamplingParams.__struct_fields__)


def completion_of(body: Generate) -> bodies.Completion:
    given = {name: getattr(body.sampling_params, name) for name in _SAMPLING}
    if given["logprob_token_ids"] is not None and given["logprobs"] is None:  # as in vLLM, the ids request logprobs
        given["logprobs"] = 0
    return bodies.Completion(
        prompt=[body.token_ids],
        return_token_ids=True,
        vllm_xargs=body.sampling_params.extra_args,
        **given | {"n": given["n"] or 1},
        **{name: getattr(body, name) for name in _BESIDE},
    )
