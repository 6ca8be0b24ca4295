"""Model: its tables say what a plain computation of whole distributions says."""

import random
from pathlib import Path

import numpy as np
import pytest

from tests.engines.ngram import reference
from tests.engines.ngram.training.learning import documents, learned, learned_tables
from tokenbus_engines.ngram.model import FLOOR, WIDTH, Model, default_model
from tokenbus_engines.ngram.tokenizer import default_tokenizer

ROOT = Path(__file__).resolve().parents[3]
TOLERANCE = 2e-6
"""Of logprobs, where sums were added up in another order."""


def histories() -> list[list[int]]:
    """Return ends of texts: from the taught ones, and of tokens thrown together."""
    chance = random.Random(4)  # noqa: S311 - a test's
    texts = [[default_tokenizer().end_token, *default_tokenizer().encode(text)] for text in documents()]
    found = []
    for _ in range(150):
        text = chance.choice(texts)
        place = chance.randrange(1, len(text))
        found.append(text[max(0, place - chance.randrange(1, 6)) : place])
    found += [[chance.randrange(default_tokenizer().vocabulary_size) for _ in range(4)] for _ in range(30)]
    found += [[chance.randrange(300) for _ in range(4)] for _ in range(70)]
    return found


HISTORIES = histories()


@pytest.mark.parametrize("lower", [False, True], ids=["target", "draft"])
def test_lines_are_the_top_of_the_whole_distribution(lower: bool) -> None:  # noqa: FBT001 - which model
    """A context's line has the most probable tokens in order, ties by the lower id, with their logprobs (case 33)."""
    model = default_model()
    ties = 0
    for history in HISTORIES:
        context = model.contexts.of(history)
        truth = reference.logprobs_after(history)
        if lower:
            context, truth = int(model.drafts[context]), reference.draft_logprobs_after(history)
        assert model.ids[context].tolist() == reference.ordered(truth)[:WIDTH]
        assert np.abs(model.logits[context, :WIDTH] - truth[model.ids[context]]).max() <= TOLERANCE
        assert model.ranks[context, :WIDTH].tolist() == [reference.rank(truth, token) for token in model.ids[context]]
        tail = np.delete(truth, model.ids[context])
        assert (tail == model.logits[context, WIDTH]).all()
        assert (tail < truth[model.ids[context]].min()).all()
        ties += len(set(model.ranks[context, :WIDTH].tolist())) < WIDTH
    assert ties > 20, "or ties were not tested"


def test_a_text_is_in_the_longest_context_that_it_ends_in() -> None:
    """Front on token by token leads where a look at the last tokens leads, along lines and through tails."""
    model = default_model()
    chance = np.random.default_rng(7)
    text = default_tokenizer().encode("In the evening the")
    context = model.contexts.of(text)
    in_tail = 0
    for _ in range(600):
        token = int(chance.choice(model.ids[context])) if chance.random() < 0.8 else int(chance.integers(400))
        here = np.array([context])
        place = model.places(here, np.array([token]))
        in_tail += int(place[0] >= WIDTH)
        assert int(model.tokens(here, place)[0]) == token
        text.append(token)
        context = int(model.after(here, place, np.array([token]))[0])
        assert context == model.contexts.of(text) == model.contexts.of(text[-3:])
        longest = reference.context_of(text)
        draft = reference.context_of(text, 2)
        assert context == model.contexts.of(list(longest))
        assert int(model.drafts[context]) == model.contexts.of(list(draft))
    assert in_tail > 50


def test_places_and_tokens_are_each_others_inverse() -> None:
    """Every token has one place in a context, and every place one token; tail places go by id."""
    model = default_model()
    tokens = np.arange(model.vocabulary_size)
    for context in (0, 5, 2_000, model.contexts.count - 1):
        here = np.full(tokens.size, context)
        places = model.places(here, tokens)
        assert sorted(places.tolist()) == tokens.tolist()
        assert (model.tokens(here, places) == tokens).all()
        tail = tokens[places >= WIDTH]
        assert (places[tail] == WIDTH + np.arange(tail.size)).all()


def test_crossed_places_lead_to_the_same_tokens() -> None:
    """Where a draft's token stands in the target's context, and the other way around, is looked up and right."""
    model = default_model()
    contexts = np.arange(0, model.contexts.count, 37)
    for place in range(WIDTH):
        wanted = model.ids[model.drafts[contexts], place]
        assert (model.tokens(contexts, model.draft_places[contexts, place].astype(np.int64)) == wanted).all()
        back = model.places_in_draft[contexts, place].astype(np.int64)
        found = model.places(model.drafts[contexts], model.ids[contexts, place].astype(np.int64))
        assert (back == np.minimum(found, WIDTH)).all()


def test_another_text_is_another_model() -> None:
    """A model's fingerprint follows from what it was taught, so that two different models differ in it."""
    tables = [learned_tables(default_tokenizer(), documents()[:30]) for _ in range(2)]
    first, second = (Model(default_tokenizer(), each).fingerprint for each in tables)
    assert first == second != default_model().fingerprint


def test_the_committed_file_is_what_is_learned() -> None:
    """The file that the engine reads has the pieces and the tables that learning the texts gives."""
    tokenizer, model = learned(documents()), default_model()
    assert tokenizer.vocabulary_size == default_tokenizer().vocabulary_size
    pieces = [
        each.token_bytes(token) for each in (tokenizer, default_tokenizer()) for token in range(model.vocabulary_size)
    ]
    assert pieces[: len(pieces) // 2] == pieces[len(pieces) // 2 :]
    tables = learned_tables(tokenizer, documents())
    assert (tables.ids == model.ids).all()
    assert (tables.parents == model.contexts.parents).all()
    np.testing.assert_allclose(tables.logprobs, model.logits[:, :WIDTH], rtol=0, atol=TOLERANCE)


def test_the_page_tells_the_models_size() -> None:
    """The page about the engine gives the vocabulary, the contexts and the width that the model has."""
    page = (ROOT / "docs" / "engine-ngram.md").read_text()
    model = default_model()
    assert f" {model.vocabulary_size:,} with the one that ends a text" in page
    assert f"Each of the {model.contexts.count:,} contexts keeps its {WIDTH} likeliest tokens" in page
    assert f"share {1 - FLOOR:.2%}".replace("%", " %") in page
