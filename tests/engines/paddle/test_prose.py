"""Prose: what the weights are trained on, and what they never saw."""

from itertools import islice

from tests.engines.paddle.training.prose import stories, tokens_of


def test_stories_are_the_same_for_a_seed() -> None:
    """A seed fixes the stories, and another seed gives others."""
    first = list(islice(stories(1, held_out=False), 5))
    assert first == list(islice(stories(1, held_out=False), 5))
    assert first != list(islice(stories(2, held_out=False), 5))


def test_held_out_stories_are_not_among_those_for_training() -> None:
    """No opening sentence of a held-out story, where person meets place, is one that training can see."""
    held_out = {text.split(".")[0] for text in islice(stories(3, held_out=True), 300) if text.startswith("One ")}
    seen = {text.split(".")[0] for text in islice(stories(4, held_out=False), 5000) if text.startswith("One ")}
    assert len(held_out) > 50
    assert not held_out & seen


def test_stories_are_plain_text_from_beginning_to_end() -> None:
    """A story is plain text with every name filled in, between a token for its beginning and one for its end."""
    for text in islice(stories(5, held_out=True), 100):
        assert text.isascii()
        assert "{" not in text
        tokens = tokens_of(text)
        assert (tokens[0], tokens[-1], bytes(tokens[1:-1]).decode()) == (256, 257, text)
