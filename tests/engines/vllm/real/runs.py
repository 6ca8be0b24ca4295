"""The same requests by vLLM's own `LLM.generate` and by the engine, and what both must agree on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.engines.vllm.real.hosts import apart
from tests.engines.vllm.tiny_model import CONTEXT
from tokenbus.engines.vllm import VllmEngine
from tokenbus.worker import StepAssembler
from tokenbus_contracts import Limits, LogprobBatch, RowStatus, encode
from tokenbus_contracts.batch import FIRST_STOP_TEXT, STOP_TOKEN
from tokenbus_contracts.generated.request_pb2 import ErrorCode, Generate, SamplingParameters, TextPrompt, TokenPrompt

SHARED: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "gpu_memory_utilization": 0.05,
    "max_model_len": CONTEXT,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "block_size": 32,
    "kv_cache_memory_bytes": 1 << 24,
}
WHOLE: dict[str, Any] = {**SHARED, "dtype": "float32", "max_num_batched_tokens": SHARED["max_num_seqs"] * CONTEXT}
"""With room for all prompts in a step: on a CPU vLLM itself fails where it splits a seeded request's prompt, which
happens where requests come as they like.
"""
LORA: dict[str, Any] = {**SHARED, "enable_lora": True, "max_loras": 4, "max_lora_rank": 8}
"""On a CPU vLLM adds the last place's adapter to requests without one: that place stays empty."""
LEAST = -9999.0
"""What a message has for a logprob of minus infinity, as of a token that the form of an output rules out."""
ENDS = {"stop": RowStatus.FINISHED_STOP, "length": RowStatus.FINISHED_LENGTH}


@dataclass(frozen=True)
class Case:
    """One request: what it continues, and how."""

    prompt: str | Sequence[int]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """By the names of our own fields."""
    top_logprobs: int | None = None
    ours: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of ours, which vLLM has under other names or in another form."""
    theirs: Mapping[str, Any] = field(default_factory=dict)
    """The same as vLLM has them."""
    adapter: Path | None = None
    """The folder of the LoRA adapter that it asks for, by the folder's name."""

    def generate(self, key: int) -> Generate:
        prompt = (
            {"text": TextPrompt(text=self.prompt)}
            if isinstance(self.prompt, str)
            else {"tokens": TokenPrompt(token_ids=self.prompt)}
        )
        adapter = None if self.adapter is None else self.adapter.name
        sampling = SamplingParameters(**self.sampling, **self.ours, lora_adapter=adapter)
        return Generate(request_id=key, sampling=sampling, top_logprobs=self.top_logprobs, **prompt)


@dataclass
class Answer:
    status: RowStatus | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    alternatives: list[dict[int, float]] = field(default_factory=list)
    stop: int | str | None = None
    """Which of its own stops ended it."""
    stop_number: int = 0
    """The same, as its last row has it."""
    text: str = ""
    """Of vLLM's own answers alone."""
    drafts: int = 0
    was_preempted: bool = False
    steps: int = 0


def arguments(options: Mapping[str, Any]) -> list[str]:
    given = []
    for name, value in options.items():
        given.append(f"--{name.replace('_', '-')}")
        if value is not True:
            given.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return given


def reference(
    model: Path, options: Mapping[str, Any], *groups: Sequence[Case], stops_of: int | None = None
) -> list[tuple[list[Case], list[Answer]]]:
    """Return groups of requests with vLLM's own answers; each group is generated at once.

    With `stops_of`, a last group has the requests of that group twice, with a stop token and with a stop string that
    lie in its answers.
    """
    return apart(answers_of, str(model), dict(options), [list(group) for group in groups], stops_of)


def answered(
    engine: VllmEngine, cases: Sequence[Case], first_key: int = 2**63, accepted: Sequence[int] = ()
) -> list[Answer]:
    answers = {}
    for key, case in enumerate(cases, first_key):
        generate = case.generate(key)
        if accepted:
            generate.continuation.token_ids.extend(accepted)
            generate.continuation.turn, generate.continuation.reason = 1, ErrorCode.ERROR_CODE_WORKER_LOST
        engine.admit(generate)
        answers[key] = Answer(tokens=list(accepted))
    assembler = StepAssembler(Limits.default(), engine.vocabulary_size)
    while engine.has_work:
        for arrays in engine.step():
            for batch in assembler.assemble(arrays):
                encode(LogprobBatch.of_views(batch.header._replace(worker_id="w"), batch.columns), Limits.default())
                for row in batch.rows():
                    add(answers[row.request_id], row)
    for case, answer in zip(cases, answers.values(), strict=True):
        answer.stop = stop_of(case, answer)
    return list(answers.values())


def stop_of(case: Case, answer: Answer) -> int | str | None:
    """Return which of its own stops ended a request, by what its last row has."""
    if answer.stop_number == STOP_TOKEN:
        return answer.tokens[-1]
    place, texts = answer.stop_number - FIRST_STOP_TEXT, case.sampling.get("stop", ())
    return texts[place] if place >= 0 else None


def add(answer: Answer, row: Any) -> None:  # noqa: ANN401 - a batch's row
    assert row.position == len(answer.tokens)
    assert answer.status not in ENDS.values()
    answer.status = row.status
    answer.stop_number = row.stop
    answer.steps += 1
    answer.drafts += row.draft_token_count
    answer.was_preempted |= row.status is RowStatus.PREEMPTED
    answer.tokens += row.token_ids.tolist()
    answer.logprobs += row.logprobs.tolist()
    answer.ranks += row.ranks.tolist()
    if not row.logprobs.size:
        return
    for ids, values in zip(row.alternative_token_ids.tolist(), row.alternative_logprobs.tolist(), strict=True):
        answer.alternatives.append(dict(zip(ids, values, strict=True)))


def check(case: Case, mine: Answer, theirs: Answer) -> None:
    """Hold an answer to vLLM's own, bit by bit; where values are equal, either token may be the last of the top k."""
    assert (mine.status, mine.tokens, mine.stop) == (theirs.status, theirs.tokens, theirs.stop), case
    assert mine.logprobs == theirs.logprobs, case
    assert len(mine.alternatives) == len(theirs.alternatives)
    for place, (ours, unbounded) in enumerate(zip(mine.alternatives, theirs.alternatives, strict=True)):
        others = {token: max(value, LEAST) for token, value in unbounded.items()}
        assert len(ours) == case.top_logprobs
        assert list(ours.values()) == list(others.values()), (case, place)
        last = min(ours.values(), default=0.0)
        assert {token for token in ours if ours[token] > last} == {token for token in others if others[token] > last}
        value, rank = mine.logprobs[place], mine.ranks[place]
        if mine.tokens[place] not in ours:  # else vLLM's API says its place among the alternatives
            assert rank == theirs.ranks[place]
        assert sum(each > value for each in ours.values()) < rank


def answers_of(
    model: str, options: Mapping[str, Any], groups: Sequence[list[Case]], stops_of: int | None
) -> list[tuple[list[Case], list[Answer]]]:
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
    from vllm.sampling_params import StructuredOutputsParams

    form = given.get("structured_outputs")
    return {**given, **({"structured_outputs": StructuredOutputsParams(**form)} if form else {})}
