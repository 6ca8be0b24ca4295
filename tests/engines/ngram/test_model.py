"""Model: its tables say what a plain computation of whole distributions says."""

import random

import numpy as np
import pytest

from tests.engines.ngram import reference
from tests.engines.ngram.training.learning import Plain, documents, learned
from tokenbus.engines.ngram.model import WIDTH, default_model
from tokenbus.engines.ngram.tokenizer import default_tokenizer

TOLERANCE = 2e-6
"""Of logprobs, where sums were added up in another order."""


def histories() -> list[list[int]]:
    chance = random.Random(4)  # noqa: S311 - a test's
    texts = [[default_tokenizer().end_token, *default_tokenizer().encode(text)] for text in documents()]
    found = []
    for _ in range(60):
        text = chance.choice(texts)
        place = chance.randrange(1, len(text))
        found.append(text[max(0, place - chance.randrange(1, 6)) : place])
    found += [[chance.randrange(default_tokenizer().vocabulary_size) for _ in range(4)] for _ in range(10)]
    found += [[chance.randrange(300) for _ in range(4)] for _ in range(30)]
    return found


HISTORIES = histories()


@pytest.mark.parametrize("lower", [False, True], ids=["target", "draft"])
def test_lines_are_the_top_of_the_whole_distribution(lower: bool) -> None:  # noqa: FBT001 - which model
    """A context's line has the most probable tokens in order, ties by the lower id, with their logprobs (case 33)."""
    model = default_model()
    ties = 0
    for history in HISTORIES:
        context = model.context_of(history)
        truth = reference.logprobs_after(history)
        if lower:
            context, truth = int(model.drafts[context]), reference.draft_logprobs_after(history)
        assert model.ids[context].tolist() == reference.ordered(truth)[:WIDTH]
        assert np.abs(model.logits[context, :WIDTH] - truth[model.ids[context]]).max() <= TOLERANCE
        assert model.ranks[context].tolist() == [reference.rank(truth, token) for token in model.ids[context]]
        assert np.isneginf(np.delete(truth, model.ids[context])).all()
        assert abs(model.chances[context].sum() - 1) < TOLERANCE
        ties += len(set(model.ranks[context].tolist())) < WIDTH
    assert ties > 5, "or ties were not tested"


def test_a_text_is_in_the_longest_context_that_it_ends_in() -> None:
    model = default_model()
    chance = np.random.default_rng(7)
    text = default_tokenizer().encode("In the evening the")
    context = model.context_of(text)
    for _ in range(200):
        place = int(chance.integers(WIDTH))
        is_known = chance.random() < 0.8
        token = int(model.ids[context, place]) if is_known else int(chance.integers(400))
        text.append(token)
        after = int(model.after(np.array([context]), np.array([token]))[0])
        assert not is_known or after == model.next[context, place]
        context = after
        assert context == model.context_of(text) == model.context_of(text[-3:])
        assert context == model.context_of(list(reference.context_of(text)))
        assert int(model.drafts[context]) == model.context_of(list(reference.context_of(text, 2)))


def test_drafts_and_targets_columns_lead_to_the_same_tokens() -> None:
    model = default_model()
    lacking = (model.draft_columns == WIDTH).any(1).nonzero()[0]
    assert lacking.size > 100
    contexts = np.concatenate([np.arange(0, model.count, 37), lacking[::7]])
    for context in contexts.tolist():
        mine, drafted = model.ids[context].tolist(), model.ids[model.drafts[context]].tolist()
        there = [mine.index(token) if token in mine else WIDTH for token in drafted]
        assert model.draft_columns[context].tolist() == there
        back = [drafted.index(token) if token in drafted else WIDTH for token in mine]
        assert model.columns_in_draft[context].tolist() == [*back, WIDTH]
        after = model.after(np.full(WIDTH, context), np.array(drafted))
        assert model.draft_next[context].tolist() == after.tolist()


@pytest.mark.nightly
def test_the_committed_file_is_what_is_learned() -> None:
    tokenizer, committed = learned(documents()), default_tokenizer()
    every = range(committed.vocabulary_size)
    assert [*map(tokenizer.token_bytes, every)] == [*map(committed.token_bytes, every)]
    tables, known = Plain(tokenizer, documents()).tables(), default_model()._tables
    for name in ("ids", "parents", "keys", "numbers", "ends"):
        np.testing.assert_array_equal(getattr(tables, name), getattr(known, name), name)
    np.testing.assert_allclose(tables.logprobs, known.logprobs, rtol=0, atol=TOLERANCE)
