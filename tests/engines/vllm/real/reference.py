"""vLLM's own `LLM.generate`: the answers that the engine is held to."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.engines.vllm.real.runs import ENDS, Answer, Case


def answers_of(
    model: str, options: Mapping[str, Any], groups: Sequence[list[Case]], stops_of: int | None
) -> list[tuple[list[Case], list[Answer]]]:
    """Return groups of requests with their answers, as `runs.reference` says."""
    from vllm import LLM

    made = LLM(model=model, disable_log_stats=True, **options)
    found = [(group, expected(made, group)) for group in groups]
    if stops_of is not None:
        stopped = [
            replace(case, sampling={**case.sampling, **stop})
            for case, answer in zip(*found[stops_of], strict=True)
            for stop in (
                {"stop_token_ids": [answer.tokens[len(answer.tokens) // 2]]},
                {"stop": [answer.text[len(answer.text) // 2 :][:3], "never there"]},
            )
        ]
        found.append((stopped, expected(made, stopped)))
    if "scheduler_cls" in options:
        made.llm_engine.engine_core.shutdown()  # then all of it is published
    return found


def expected(made: Any, cases: Sequence[Case]) -> list[Answer]:  # noqa: ANN401 - vLLM's LLM
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    asked = [
        SamplingParams(
            **{
                {"ignore_end_token": "ignore_eos"}.get(name, name): list(value) if name.startswith("stop") else value
                for name, value in case.sampling.items()
            },
            **_formed(case.theirs),
            logprobs=case.top_logprobs,
        )
        for case in cases
    ]
    prompts = [case.prompt if isinstance(case.prompt, str) else {"prompt_token_ids": case.prompt} for case in cases]
    folders = sorted({case.adapter for case in cases if case.adapter is not None})
    loras = [
        None
        if case.adapter is None
        else LoRARequest(case.adapter.name, folders.index(case.adapter) + 1, str(case.adapter))
        for case in cases
    ]
    answers = []
    for case, output in zip(cases, made.generate(prompts, asked, use_tqdm=False, lora_request=loras), strict=True):
        (only,) = output.outputs
        answer = Answer(ENDS[only.finish_reason], list(only.token_ids), stop=only.stop_reason, text=only.text)
        for token, found in zip(only.token_ids, only.logprobs or (), strict=case.top_logprobs is not None):
            answer.logprobs.append(found[token].logprob)
            answer.ranks.append(found[token].rank)
            best = sorted(((each.logprob, token) for token, each in found.items()), reverse=True)
            answer.alternatives.append({token: value for value, token in best[: case.top_logprobs]})
        answers.append(answer)
    return answers


def _formed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of vLLM's SamplingParams, with the form of an output as vLLM's own object."""
    from vllm.sampling_params import StructuredOutputsParams

    form = given.get("structured_outputs")
    return {**given, **({"structured_outputs": StructuredOutputsParams(**form)} if form else {})}
