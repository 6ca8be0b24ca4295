"""Prompts' scores of the demo engines: those of a plain computation, whole, in chunks, and preempted."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest

from tests.engines.ngram import reference as ngram_reference
from tests.engines.paddle.needs import NEEDS_PADDLE
from tests.engines.paddle.reference import reference, tokens_of
from tests.engines.runs import Run, asked, ngram, paddle
from tokenbus.engines.ngram import default_tokenizer
from tokenbus.engines.prompt_scoring import LEAST
from tokenbus.worker import EngineStepError
from tokenbus_contracts import PromptScores, RowStatus
from tokenbus_contracts.generated.request_pb2 import Generate, PromptScoring

STORY = "The sun was shining. That night Paul was at the old mill again. "
Truth = Callable[[Sequence[int]], npt.NDArray[Any]]
"""The logprobs of all tokens after each token of a text."""


def ngram_truth(tokens: Sequence[int]) -> npt.NDArray[Any]:
    return np.array([ngram_reference.logprobs_after(tokens[: place + 1]) for place in range(len(tokens))])


def paddle_truth(tokens: Sequence[int]) -> npt.NDArray[Any]:
    return reference().logprobs(reference().states(tokens))


ENGINES = [
    pytest.param(ngram, ngram_truth, 2e-6, default_tokenizer().encode, id="ngram"),
    pytest.param(paddle, paddle_truth, 2e-4, lambda text: [256, *text.encode()], id="paddle", marks=NEEDS_PADDLE),
]


def scoring(key: int, prompt: str | Sequence[int], most: int = 2, **wanted: Any) -> Generate:  # noqa: ANN401
    generate = asked(key, prompt, seed=1, max_tokens=max(1, most))
    generate.prompt_scoring.CopyFrom(PromptScoring(without_generation=not most, **wanted))
    return generate


def scores_of(run: Run) -> dict[int, PromptScores]:
    found: dict[int, PromptScores] = {}
    for arrays in run.arrays:
        for each in (each for one in arrays for each in one.prompt_scores):
            assert each.request_id not in found
            assert each.request_id in arrays[0].request_ids.tolist()
            found[each.request_id] = each
    return found


def check(found: PromptScores, prompt: Sequence[int], asked_for: PromptScoring, truth: Truth, tolerance: float) -> None:
    first = max(1, min(asked_for.first_position, len(prompt)))
    assert (found.position, found.prompt_tokens, found.is_last) == (first, len(prompt), True)
    assert found.token_ids.tolist() == list(prompt[first:])
    expected = np.maximum(truth(prompt)[first - 1 : -1], LEAST)
    own = expected[np.arange(len(expected)), found.token_ids]
    assert np.allclose(found.logprobs, own, rtol=0, atol=tolerance)
    least = 1 + (expected > own[:, None] + tolerance).sum(axis=1)
    most = 1 + (expected >= own[:, None] - tolerance).sum(axis=1)
    assert ((least <= found.ranks) & (found.ranks <= most)).all()
    if asked_for.token_ids:
        assert (found.alternative_token_ids == list(asked_for.token_ids)).all()
    shown = np.take_along_axis(expected, found.alternative_token_ids.astype(np.intp), 1)
    assert np.allclose(found.alternative_logprobs, shown, rtol=0, atol=tolerance)
    if asked_for.top_logprobs:
        best = -np.sort(-expected, axis=1)[:, : asked_for.top_logprobs]
        assert np.allclose(found.alternative_logprobs, best, rtol=0, atol=tolerance)
        assert (np.diff(found.alternative_logprobs, axis=1) <= 0).all()


@pytest.mark.parametrize(("engine", "truth", "tolerance", "encode"), ENGINES)
def test_scores_are_those_of_a_plain_computation(
    engine: Callable[..., Run], truth: Truth, tolerance: float, encode: Callable[[str], list[int]]
) -> None:
    """Also where prompts are computed in chunks, and preempted."""
    requests = [
        scoring(1, STORY, top_logprobs=20),
        scoring(2, "One ", 0),
        scoring(3, STORY * 2, 6, token_ids=[9, 7, 9, *range(100, 180)]),
        scoring(4, [5], top_logprobs=3),
        scoring(5, STORY, 9, top_logprobs=1, first_position=20),
        scoring(6, STORY, 0, top_logprobs=2, first_position=4_000),
    ]
    plain = asked(7, STORY, seed=1, max_tokens=5)
    run = engine([*requests, plain], prefill_chunk=17, max_running=2, slice_steps=1).to_the_end()
    found = scores_of(run)
    assert found.keys() == {1, 2, 3, 4, 5, 6}
    for generate in requests:
        is_text = generate.WhichOneof("prompt") == "text"
        prompt = encode(generate.text.text) if is_text else tokens_of(generate)
        check(found[generate.request_id], prompt, generate.prompt_scoring, truth, tolerance)
    for key in (2, 6):
        assert (run.got[key].tokens, run.got[key].statuses[-1]) == ([], RowStatus.FINISHED_LENGTH)
    assert (len(run.got[1].tokens), len(run.got[7].tokens)) == (2, 5)


def test_failed_step_keeps_nothing_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ngram([scoring(1, STORY, top_logprobs=4)], prefill_chunk=6)
    run.step()
    with monkeypatch.context() as patch:
        patch.setattr(run.engine, "_piece_scores", Mock(side_effect=RuntimeError("no")))
        with pytest.raises(EngineStepError):
            run.step()
    found = scores_of(run.to_the_end())
    check(found[1], default_tokenizer().encode(STORY), PromptScoring(top_logprobs=4), ngram_truth, 2e-6)


def test_aborted_request_leaves_nothing() -> None:
    run = ngram([scoring(1, STORY, top_logprobs=4)], prefill_chunk=6)
    run.step()
    run.engine.abort(1)
    run.to_the_end()
    assert not run.engine._prompts
    assert scores_of(run) == {}


@pytest.mark.parametrize(
    ("wanted", "line"),
    [
        ({"top_logprobs": 21}, "prompt_scoring.top_logprobs: at most 20, got 21"),
        ({"token_ids": [3, 10**6]}, r"prompt_scoring.token_ids\[1\]: below \d+, got 1000000: out of vocabulary"),
    ],
)
def test_wrong_wishes_are_refused(wanted: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}$"):
        ngram([scoring(1, "One", **wanted)])
