"""The committed weights' training: what it learns, and how good the draft heads are on stories that it did not have."""

import re
from itertools import islice
from pathlib import Path

import pytest

from tests.engines.paddle.needs import NEEDS_PADDLE
from tests.engines.paddle.training.__main__ import main
from tests.engines.paddle.training.prose import stories
from tests.engines.runs import asked, paddle, tokens_alone
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


SEED = 20
PROMPTS = [text[: text.index(".") + 2 + 20] for text in islice(stories(SEED, held_out=True), 12)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_most_drafts_are_accepted(temperature: float) -> None:
    """Where held-out stories go on, the end of each left out."""
    asked_for = [
        asked(key, prompt, max_tokens=120, temperature=temperature, seed=key) for key, prompt in enumerate(PROMPTS, 1)
    ]
    run = paddle(asked_for, max_running=32).to_the_end()
    drafted = accepted = 0
    for got in run.got.values():
        for row in got.rows[1:-1]:
            drafted += row.draft_token_count
            accepted += row.token_ids.size - 1
    assert drafted > 500
    assert accepted / drafted > 0.5
