"""What the demo engines share: a step that fails changes nothing, and one that is paused computes nothing new."""

from unittest.mock import Mock

import pytest

from tests.engines import runs
from tests.engines.paddle.needs import NEEDS_PADDLE
from tests.engines.runs import Run, asked, ngram
from tokenbus.worker import EngineStepError
from tokenbus_contracts import RowStatus

REQUESTS = [
    asked(1, seed=1, max_tokens=12, stop=["zzz"]),
    asked(2, seed=2, max_tokens=12, stop=["poison"]),
    asked(3, seed=3, max_tokens=12),
    asked(4, seed=4, max_tokens=12, temperature=0.0),
]


def running(name: str, steps: int, role: str) -> Run:
    run: Run = getattr(runs, name)(REQUESTS, role=role, prefill_chunk=20)
    for _ in range(steps):
        run.step()
    run.engine.abort(4)
    return run


@pytest.mark.parametrize(
    ("method", "steps", "role"),
    [("_compute", 0, "mixed"), ("_outcome", 2, "mixed"), ("_scored", 3, "mixed"), ("_arrays", 0, "prefill")],
)
@pytest.mark.parametrize("name", ["ngram", pytest.param("paddle", marks=NEEDS_PADDLE)])
def test_step_that_fails_is_computed_again(
    name: str, method: str, steps: int, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm, run = running(name, steps, role).to_the_end(), running(name, steps, role)

    with monkeypatch.context() as patch:
        patch.setattr(run.engine, method, Mock(side_effect=RuntimeError("broken")))
        with pytest.raises(EngineStepError, match=r"^RuntimeError: broken$"):
            run.step()
    run.to_the_end()
    found, wanted = ({key: (got.tokens, got.statuses) for key, got in each.got.items()} for each in (run, calm))
    assert found == wanted
    assert run.got[4].statuses[-1] is RowStatus.ABORTED


def test_aborted_request_ends_while_it_is_paused() -> None:
    run = ngram([asked(key, max_tokens=300, ignore_end_token=True) for key in (1, 2)], max_running=1)
    run.step()
    run.engine.pause(running=True)
    assert not run.engine.has_work
    run.engine.abort(1)
    run.engine.abort(2)
    run.to_the_end()
    assert [run.got[key].statuses[-1] for key in (1, 2)] == [RowStatus.ABORTED] * 2
    run.admit(asked(3, max_tokens=2, ignore_end_token=True))
    assert not run.engine.has_work
    run.engine.resume()
    assert len(run.to_the_end().got[3].tokens) == 2


def test_those_that_run_end_though_they_are_preempted() -> None:
    """New ones wait, and do not take the places of those that have begun."""
    requests = [asked(key, seed=key, max_tokens=40, ignore_end_token=True) for key in range(1, 6)]
    run = ngram(requests, max_running=2, slice_steps=1)
    while len([key for key in run.got if run.got[key].tokens]) < 4:
        run.step()
    begun = {key for key in run.got if run.got[key].tokens}
    late = asked(9, seed=9, max_tokens=3, ignore_end_token=True)
    run.engine.pause(running=False)
    run.admit(late)
    run.to_the_end()
    assert {key for key in run.got if run.got[key].tokens} == begun
    assert all(len(run.got[key].tokens) == 40 for key in begun)
    run.engine.resume()
    run.to_the_end()
    assert len(run.got[9].tokens) == 3
    assert all(len(run.got[key].tokens) == 40 for key in range(1, 6))


def test_request_that_an_engine_cannot_keep_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ngram().engine
    monkeypatch.setattr("tokenbus.engines.ngram.model.Model.context_of", lambda *_: "none")
    with pytest.raises(ValueError, match="invalid literal"):
        engine.admit(asked(7, seed=1, max_tokens=4))
    monkeypatch.undo()
    assert not engine.has_work
    assert engine.admit(asked(7, seed=1, max_tokens=4)) > 0
