"""A step that fails changes nothing: what it would have given comes with the next one."""

from unittest.mock import Mock

import pytest

from tests.engines import runs
from tests.engines.paddle.needs import NEEDS_PADDLE
from tests.engines.runs import Run, asked
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
    [("_compute", 0, "mixed"), ("_outcome", 2, "mixed"), ("_scored", 3, "mixed"), ("_handed_off", 0, "prefill")],
)
@pytest.mark.parametrize("name", ["ngram", pytest.param("paddle", marks=NEEDS_PADDLE)])
def test_step_that_fails_is_computed_again(
    name: str, method: str, steps: int, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a step fails, the next one, and all after it, give what it would have given, an abort before it too."""
    calm, run = running(name, steps, role).to_the_end(), running(name, steps, role)

    with monkeypatch.context() as patch:
        patch.setattr(run.engine, method, Mock(side_effect=RuntimeError("broken")))
        with pytest.raises(EngineStepError, match=r"^RuntimeError: broken$"):
            run.step()
    run.to_the_end()
    found, wanted = ({key: (got.tokens, got.statuses) for key, got in each.got.items()} for each in (run, calm))
    assert found == wanted
    assert run.got[4].statuses[-1] is RowStatus.ABORTED
    assert run.states.keys() == calm.states.keys()
