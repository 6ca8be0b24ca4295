"""Scores of prompts by the engine, and by vLLM's own `LLM.generate`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.engines.vllm.real.hosts import EngineHost, apart
from tests.engines.vllm.real.runs import arguments
from tests.engines.vllm.real.test_engine import FEW_BLOCKS, LONG
from tokenbus.engines.vllm import VllmEngine
from tokenbus_contracts import PromptScores, RowStatus
from tokenbus_contracts.generated.request_pb2 import Generate, PromptScoring, SamplingParameters, TokenPrompt

Found = tuple[PromptScores, RowStatus, list[int]]
PROMPTS: list[list[int]] = [[5], [5, 6], [7, 8, 9, 300, 2, 0], LONG]
ASKED = [
    (prompt, PromptScoring(top_logprobs=k, first_position=first, without_generation=alone))
    for prompt in PROMPTS
    for k, first, alone in ((0, 0, False), (3, 0, True), (20, 4, True))
]


def ours(engine: VllmEngine, asked: Sequence[tuple[list[int], bytes]]) -> list[Found]:
    found: dict[int, Any] = {}
    for key, (prompt, scoring) in enumerate(asked, 1):
        sampling = SamplingParameters(temperature=0, max_tokens=3)
        tokens, scored = TokenPrompt(token_ids=prompt), PromptScoring.FromString(scoring)
        engine.admit(Generate(request_key=key, tokens=tokens, sampling=sampling, prompt_scoring=scored))
        found[key] = [None, None, []]
    while engine.has_work:
        for arrays in engine.step():
            for scores in arrays.prompt_scores:
                assert found[scores.request_key][0] is None
                found[scores.request_key][0] = scores
            ends = np.cumsum(arrays.token_counts)
            for key, status, end, count in zip(
                arrays.request_keys.tolist(),
                np.asarray(arrays.statuses).tolist(),
                ends,
                arrays.token_counts,
                strict=True,
            ):
                assert not count or found[key][0] is not None, "the scores come first"
                found[key][1] = RowStatus(status)
                found[key][2] += arrays.token_ids[end - count : end].tolist()
    return [tuple(each) for each in found.values()]


def theirs(model: Path, options: dict[str, Any], asked: Sequence[tuple[list[int], int]]) -> list[Any]:
    """Return vLLM's own scores of each prompt: for each position None, or logprobs and ranks by token."""
    from vllm import LLM, SamplingParams

    made = LLM(model=str(model), disable_log_stats=True, **options)
    sampling = [SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=k) for _, k in asked]
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt, _ in asked]
    answers = made.generate(prompts, sampling, use_tqdm=False)
    return [
        [None if each is None else {token: (one.logprob, one.rank) for token, one in each.items()} for each in scores]
        for scores in (answer.prompt_logprobs or [] for answer in answers)
    ]


def test_same_scores(model: Path, engine_of: Callable[..., EngineHost]) -> None:
    """The prompts are computed whole but for the longest, which takes several steps."""
    mine = engine_of(*arguments(FEW_BLOCKS))(ours, [(prompt, scoring.SerializeToString()) for prompt, scoring in ASKED])
    expected = apart(theirs, model, FEW_BLOCKS, [(prompt, scoring.top_logprobs) for prompt, scoring in ASKED])
    for (prompt, asked), (scores, status, tokens), truth in zip(ASKED, mine, expected, strict=True):
        assert (status, len(tokens)) == (RowStatus.FINISHED_LENGTH, 0 if asked.without_generation else 3)
        first = max(1, asked.first_position)
        assert scores.token_ids.tolist() == prompt[first:]
        assert (scores.is_last, scores.prompt_tokens) == (True, len(prompt))
        for place, token in enumerate(prompt[first:]):
            has = truth[first + place]
            best = dict(
                zip(
                    scores.alternative_token_ids[place].tolist(),
                    scores.alternative_logprobs[place].tolist(),
                    strict=True,
                )
            )
            assert len(best) == asked.top_logprobs
            assert float(scores.logprobs[place]) == has[token][0]
            # vLLM's API has the place among the alternatives instead, which differs among ties.
            assert int(scores.ranks[place]) == has[token][1] or token in best
            assert {each: value for each, (value, _) in has.items() if each in best} == best
            assert scores.alternative_logprobs[place].tolist() == sorted(best.values(), reverse=True)
