"""What `--token-scores` says of tokens, and what follows from the whole distributions that vLLM itself returns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.vllm.real.hosts import EngineHost
from tests.engines.vllm.real.runs import WHOLE, Answer, Case, add, arguments, reference
from tests.engines.vllm.real.test_engine import SPECULATION
from tests.engines.vllm.tiny_model import VOCABULARY
from tokenbus.engines.vllm import VllmEngine
from tokenbus.worker import StepAssembler
from tokenbus_contracts import Limits, Row
from tokenbus_contracts.generated.request_pb2 import TokenScoring

PROMPT = [5, 6, 7, 8, 5, 6, 206, 206, 206, 206]
"""Goes on as it ends, so that what is drafted from it is right."""
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_end_token": True}
DRAWN = {"temperature": 0.9, "max_tokens": 12, "ignore_end_token": True}
ALL = {"other_logprobs": True, "entropies": True, "token_ids": [3, 1, 2], "mask_bound": 8}
SAMPLINGS: list[dict[str, Any]] = [
    {**DRAWN, "seed": 1, "top_k": 5},
    {**DRAWN, "seed": 2, "top_p": 0.8},
    {**DRAWN, "seed": 3, "top_k": 9},
    {**DRAWN, "seed": 4, "repetition_penalty": 1.3, "min_p": 0.1},
    {**GREEDY, "presence_penalty": 1.5},
    GREEDY,
]
ASKED: list[dict[str, Any] | None] = [
    ALL,
    {"mask_bound": VOCABULARY},
    {"mask_bound": 8},
    {"entropies": True},
    ALL,
    None,
]
OTHER = {"raw_logprobs": "processed_logprobs", "processed_logprobs": "raw_logprobs"}
"""The other one of vLLM's modes."""
CLOSE = 2e-5


@dataclass
class Found(Answer):
    """What the engine said of a request."""

    extras: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: Row) -> None:
        add(self, row)
        if row.extras is None:
            return
        lists = row.extras.as_lists()
        given = lists.pop("given_token_ids", None)
        lists.pop("mask_sizes", None)
        for place in range(row.token_ids.size):
            one = {name: values[place] for name, values in lists.items()}
            self.extras.append(one | ({"given_token_ids": given} if given else {}))


def ours(engine: VllmEngine, asked: Sequence[tuple[dict[str, Any], dict[str, Any] | None]]) -> list[Found]:
    found = {key: Found() for key in range(1, len(asked) + 1)}
    for key, (sampling, scoring) in enumerate(asked, 1):
        generate = Case(PROMPT, sampling, 4).generate(key)
        if scoring is not None:
            generate.token_scoring.CopyFrom(TokenScoring(**scoring))
        engine.admit(generate)
    assembler = StepAssembler(Limits.default(), engine.vocabulary_size)
    while engine.has_work:
        for arrays in engine.step():
            for batch in assembler.assemble(arrays):
                for row in batch.rows():
                    found[row.request_id].add(row)
    return list(found.values())


def check(found: Found, own: Answer, other: Answer, drawn: Answer, asked: Mapping[str, Any] | None) -> None:
    """Hold what was said to whole distributions: that of the values, the other one, and the one drawn from."""
    assert found.tokens == own.tokens == other.tokens
    for place, token in enumerate(found.tokens):
        whole = own.alternatives[place]
        assert len(whole) == VOCABULARY
        assert found.logprobs[place] == pytest.approx(whole[token], rel=1e-5, abs=CLOSE)
        best = sorted(whole.values(), reverse=True)
        assert [whole[each] for each in found.alternatives[place]] == pytest.approx(best[:4], rel=1e-5, abs=CLOSE)
        larger = sum(value > whole[token] + CLOSE for value in whole.values())
        assert larger < found.ranks[place] <= sum(value > whole[token] - CLOSE for value in whole.values())
        expected: dict[str, Any] = {}
        if asked and asked.get("other_logprobs"):
            expected["other_logprobs"] = pytest.approx(other.alternatives[place][token], rel=1e-5, abs=CLOSE)
        if asked and asked.get("entropies"):
            logprobs = np.array([value for value in whole.values() if np.isfinite(value)], np.float64)
            expected["entropies"] = pytest.approx(-(np.exp(logprobs) * logprobs).sum(), abs=1e-4)
        if asked and asked.get("token_ids"):
            expected["given_token_ids"] = asked["token_ids"]
            expected["given_logprobs"] = [
                pytest.approx(max(whole[each], -9999.0), rel=1e-5, abs=CLOSE) for each in asked["token_ids"]
            ]
        if asked and asked.get("mask_bound"):
            mask = sorted(each for each, value in drawn.alternatives[place].items() if np.isfinite(value))
            expected["masks"] = mask if len(mask) <= asked["mask_bound"] else None
        if expected:
            assert found.extras[place] == expected, (place, token)
    assert len(found.extras) == (len(found.tokens) if asked else 0)


@pytest.fixture(scope="module")
def whole(model: Path) -> dict[str, list[Answer]]:
    """What vLLM itself says of each token of the vocabulary, by its mode."""
    cases = [Case(PROMPT, sampling, VOCABULARY) for sampling in SAMPLINGS]
    return {
        mode: reference(model, {**WHOLE, "logprobs_mode": mode, "max_logprobs": VOCABULARY}, cases)[0][1]
        for mode in OTHER
    }


def options(mode: str, **further: object) -> list[str]:
    return arguments({**WHOLE, "token_scores": True, "logprobs_mode": mode, **further})


@pytest.mark.parametrize(
    ("mode", "further"),
    [("raw_logprobs", {}), ("processed_logprobs", {"tensor_parallel_size": 2})],
    ids=["raw", "processed by two processes"],
)
def test_scores(
    engine_of: Callable[..., EngineHost], whole: dict[str, list[Answer]], mode: str, further: dict[str, int]
) -> None:
    found = engine_of(*options(mode, **further))(ours, list(zip(SAMPLINGS, ASKED, strict=True)))
    drawn = whole["processed_logprobs"]
    for each in zip(found, whole[mode], whole[OTHER[mode]], drawn, ASKED, strict=True):
        check(*each)


@pytest.mark.parametrize("mode", OTHER)
def test_scores_of_drafted_tokens(
    engine_of: Callable[..., EngineHost], whole: dict[str, list[Answer]], mode: str
) -> None:
    """On a CPU vLLM 0.32 draws other tokens than those of the distribution where it verifies drafts: greedy alone."""
    greedy = [place for place, sampling in enumerate(SAMPLINGS) if sampling["temperature"] == 0]
    asked = [(SAMPLINGS[place], ALL) for place in greedy]
    found = engine_of(*options(mode, speculative_config=SPECULATION))(ours, asked)
    assert sum(each.steps for each in found) < sum(len(each.tokens) for each in found), "some steps had several tokens"
    for place, mine in zip(greedy, found, strict=True):
        check(mine, whole[mode][place], whole[OTHER[mode]][place], whole["processed_logprobs"][place], ALL)
