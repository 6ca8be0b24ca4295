"""A prefill engine begins and a decode engine goes on, or another one after a crash: with the same tokens."""

import numpy as np
import pytest

from tests.engines.paddle.needs import NEEDS_PADDLE
from tests.engines.runs import asked, paddle, tokens_alone
from tests.engines.test_continuation import both, handed_on

pytestmark = NEEDS_PADDLE

STORY = "The wind was strong. That evening Leo was at the school again. "
REQUESTS = [
    asked(1, STORY, max_tokens=40, temperature=0.0, top_logprobs=2, include_draft_logprobs=True),
    asked(2, "One morning ", max_tokens=50, seed=1, top_logprobs=0),
    asked(3, STORY * 3, max_tokens=30, seed=2, temperature=1.4),
    asked(4, [0, 65], max_tokens=30, seed=3, top_k=20, stop=["e "]),
]


def test_tokens_are_those_of_one_engine() -> None:
    """The decode engine verifies the drafts that the prefill engine published, also where all share one slot."""
    prefill = paddle(REQUESTS, role="prefill", prefill_chunk=100).to_the_end()
    for options in ({}, {"max_running": 1, "slice_steps": 4}):
        parts = handed_on(paddle, REQUESTS, prefill, **options)
        for generate in REQUESTS:
            assert parts[generate.request_id].tokens == tokens_alone(paddle().engine, generate)
    assert parts[1].drafts[0].token_ids.tolist() == prefill.got[1].rows[-1].proposal_token_ids.tolist()


@pytest.mark.parametrize("place", [0, 1])
def test_killed_engine_is_continued_by_another(place: int) -> None:
    for whole, parts in both(paddle, REQUESTS[place]):
        assert parts.tokens == whole.tokens
        assert np.allclose(parts.logprobs, whole.logprobs, rtol=0, atol=1e-4)
