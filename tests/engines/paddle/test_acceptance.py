"""Acceptance: how good the committed draft heads are, on stories that they were not trained on."""

from itertools import islice

import pytest

from tests.engines.paddle.needs import NEEDS_PADDLE
from tests.engines.paddle.training.prose import stories
from tests.engines.runs import asked, paddle

pytestmark = [*NEEDS_PADDLE, pytest.mark.nightly]

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
