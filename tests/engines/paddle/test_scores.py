"""Scores: what the model thinks of tokens."""

import numpy as np
import pytest

from tokenbus_engines.paddle.decoder import scores


@pytest.mark.parametrize("words", [1, 99, 258])
def test_scores_are_those_of_the_whole_distribution(words: int) -> None:
    """Logprobs, ranks and alternatives are what sorting every token gives: ids and ranks exactly, logprobs to 1e-6."""
    generator = np.random.default_rng(words)
    logits = generator.normal(scale=4, size=(40, words)).astype(np.float32)
    tokens = generator.integers(words, size=40)
    top_k = min(20, words)
    found = scores(logits, tokens, top_k)
    for line, (values, token) in enumerate(zip(logits.astype(np.float64), tokens, strict=True)):
        logprobs = values - np.logaddexp.reduce(values)
        order = sorted(range(words), key=lambda each: (-logprobs[each], each))[:top_k]
        assert abs(found.logprobs[line] - logprobs[token]) < 1e-6
        assert found.ranks[line] == 1 + np.count_nonzero(values > values[token])
        assert found.alternative_token_ids[line].tolist() == order
        np.testing.assert_allclose(found.alternative_logprobs[line], logprobs[order], atol=1e-6)


def test_equal_tokens_come_by_the_lower_id_for_every_k() -> None:
    """The answer for k begins with the answer for less, as equal tokens are ordered by the lower id (case 33)."""
    logits = np.array([[1.0, 2.0, 2.0, 1.0, 2.0, 1.0]], np.float32)
    answers = [scores(logits, np.array([4]), k).alternative_token_ids[0].tolist() for k in range(7)]
    assert answers[6] == [1, 2, 4, 0, 3, 5]
    assert all(answers[k] == answers[6][:k] for k in range(7))
    assert scores(logits, np.array([4]), 0).ranks.tolist() == [1]


def test_certainty_is_zero_and_no_more() -> None:
    """A token that is certain has logprob 0, and none is above it."""
    found = scores(np.array([[500.0, 0.0]], np.float32), np.array([0]), 2)
    assert found.logprobs.tolist() == [0]
    assert found.alternative_logprobs.tolist() == [[0, -500]]
