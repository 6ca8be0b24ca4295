"""Scores of prompts by the engine, and by vLLM's own `LLM.generate`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.engines.vllm.real.hosts import EngineHost, apart
from tests.engines.vllm.real.runs import SHARED, arguments
from tests.engines.vllm.real.test_engine import FEW_BLOCKS, LONG
from tests.engines.vllm.tiny_model import VOCABULARY
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
        engine.admit(Generate(request_id=key, tokens=tokens, sampling=sampling, prompt_scoring=scored))
        found[key] = [None, None, []]
    while engine.has_work:
        for arrays in engine.step():
            for scores in arrays.prompt_scores:
                assert found[scores.request_id][0] is None
                found[scores.request_id][0] = scores
            ends = np.cumsum(arrays.token_counts)
            for key, status, end, count in zip(
                arrays.request_ids.tolist(),
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


GIVEN = [([5, 6, 7, 8, 5, 6], [3]), ([9, 8], [7, 7, 300, 0]), (LONG, list(range(200)))]
"""Prompts, and the ids that are asked for beside their own."""


def test_given_ids_in_prompts(model: Path, engine_of: Callable[..., EngineHost]) -> None:
    """Prompts in several chunks, beside others that ask for the most probable tokens."""
    asked = [
        (prompt, scoring.SerializeToString())
        for prompt, given in GIVEN
        for scoring in (PromptScoring(top_logprobs=3), PromptScoring(token_ids=given, without_generation=True))
    ]
    found = [scores for scores, *_ in engine_of(*arguments({**SHARED, "token_scores": True}))(ours, asked)]
    whole = apart(theirs, model, {**SHARED, "max_logprobs": VOCABULARY}, [(prompt, VOCABULARY) for prompt, _ in GIVEN])
    for (prompt, given), truth, plain, named in zip(GIVEN, whole, found[::2], found[1::2], strict=True):
        assert named.are_named
        assert not plain.are_named
        assert plain.token_ids.tolist() == named.token_ids.tolist() == prompt[1:]
        assert plain.logprobs.tolist() == named.logprobs.tolist()
        assert plain.alternative_token_ids.shape == (len(prompt) - 1, 3)
        for place, token in enumerate(prompt[1:]):
            has = {each: value for each, (value, _) in truth[1 + place].items()}
            assert float(named.logprobs[place]) == has[token]
            assert int(named.ranks[place]) == 1 + sum(value > has[token] for value in has.values())
            assert named.alternative_token_ids[place].tolist() == given
            assert named.alternative_logprobs[place].tolist() == [has[each] for each in given]
