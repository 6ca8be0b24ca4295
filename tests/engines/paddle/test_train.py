"""Training: the script that wrote the committed weights."""

import re
from pathlib import Path

import pytest

from tests.engines.paddle.needs import NEEDS_PADDLE
from tests.engines.paddle.training.__main__ import main
from tests.engines.runs import asked, tokens_alone
from tokenbus.engines.paddle import PaddleEngine, PaddleOptions

pytestmark = [*NEEDS_PADDLE, pytest.mark.nightly]


def test_training_learns_and_writes_weights_that_an_engine_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "weights.safetensors"
    assert main(["--output", str(path), "--steps", "40", "--lines", "1"]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    losses = [[float(loss) for loss in re.findall(r"\d+\.\d{3}", line)] for line in shown]
    assert len(losses) == 2
    assert len(losses[0]) == 4
    assert all(after < before for before, after in zip(*losses, strict=True))
    assert len(tokens_alone(PaddleEngine(PaddleOptions(weights=path)), asked(1, "a", max_tokens=5, seed=1))) == 5
