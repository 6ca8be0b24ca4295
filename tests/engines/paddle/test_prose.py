"""Prose: what the weights are trained on, and what they never saw."""

from itertools import islice

from tests.engines.paddle.training.prose import stories


def test_held_out_stories_are_not_among_those_for_training() -> None:
    """No opening sentence of a held-out story, where person meets place, is one that training can see."""
    held_out = {text.split(".")[0] for text in islice(stories(3, held_out=True), 300) if text.startswith("One ")}
    seen = {text.split(".")[0] for text in islice(stories(4, held_out=False), 5000) if text.startswith("One ")}
    assert len(held_out) > 50
    assert not held_out & seen
