"""Speculation and sampling: tokens come as from the target alone, whatever the draft proposes."""

import numpy as np
import pytest

from tests.engines.ngram import reference
from tests.engines.ngram.fit import misfit
from tests.engines.ngram.reference import Choice
from tokenbus_engines.ngram.model import WIDTH, default_model
from tokenbus_engines.ngram.sampling import SamplingParams, chances_of, masses_of
from tokenbus_engines.ngram.speculation import ACCEPT, DRAFT, FINAL, Front, _from_residual, propose, single, verify
from tokenbus_engines.ngram.tokenizer import default_tokenizer
from tokenbus_engines.sampling import mixed, uniforms

ROWS = 30_000
MOST = 4.0
"""How many standard deviations a fit may be off. Seeds are fixed: what passes once passes always."""
TEXTS = ["The old man said", " and", "Doctor Brown has a rule: first she"]
CHOICES = {
    "plain": Choice(),
    "cold": Choice(temperature=0.6),
    "hot": Choice(temperature=1.7),
    "top-k": Choice(top_k=4),
    "top-k one": Choice(top_k=1, temperature=2.0),
    "top-p": Choice(top_p=0.8),
    "both": Choice(temperature=0.8, top_k=7, top_p=0.9),
    "top-p within the tail": Choice(temperature=2.5, top_p=0.85),
    "top-k within the tail": Choice(temperature=3.0, top_k=WIDTH + 60),
    "top-k far into the tail": Choice(temperature=5.0, top_k=WIDTH + 500),
    "all of it": Choice(temperature=4.0, top_p=0.999),
    "greedy": Choice(temperature=0.0),
}


def going(text: str, choice: Choice, rows: int = ROWS) -> Front:
    """Return requests that are all in the same place and differ in their seeds alone."""
    model = default_model()
    coldness = 1 / choice.temperature if choice.temperature else 1.0
    top_k = (choice.top_k or model.vocabulary_size) if choice.temperature else 1
    params = SamplingParams(np.full(rows, coldness), np.full(rows, top_k), np.full(rows, choice.top_p))
    context = model.contexts.of(default_tokenizer().encode(text))
    seeds = mixed(np.arange(rows, dtype=np.uint64))
    return Front(np.full(rows, context), np.full(rows, 3), seeds, params)


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("text", TEXTS)
def test_first_token_after_drafts_has_the_targets_distribution(text: str, choice: Choice) -> None:
    """The next token is distributed as the target says, be it accepted from the draft or drawn after a rejection."""
    model, at = default_model(), going(text, choice)
    emitted = verify(model, at, propose(model, at, 2))
    chances = reference.chosen_from(reference.logprobs_after(default_tokenizer().encode(text)), choice)
    assert misfit(emitted.tokens[:, 0], chances) < MOST
    assert misfit(single(model, at).tokens[:, 0], chances) < MOST


@pytest.mark.parametrize("draft", [Choice(temperature=0.3), Choice(temperature=4.0)], ids=["cold", "hot"])
@pytest.mark.parametrize("name", ["plain", "all of it", "top-p within the tail", "top-k far into the tail"])
@pytest.mark.parametrize("text", [" When it is", " end of the"])
def test_what_is_left_is_drawn_wherever_it_is(text: str, name: str, draft: Choice) -> None:
    """What the target gives beyond the draft is drawn exactly, in the line, in the tail and where the draft reaches.

    The draft's choice is another than the target's here, so that all three parts have their share.
    """
    model, tokens = default_model(), default_tokenizer().encode(text)
    at, target = going(text, draft), going(text, CHOICES[name])
    assert (model.draft_places[at.contexts[0]] >= WIDTH).sum() >= 4, "the draft's line reaches into the target's tail"
    numbers = uniforms(at.seeds, at.positions, FINAL)
    places = _from_residual(model, at, masses_of(model, target.contexts, target.params), numbers)
    p = reference.chosen_from(reference.logprobs_after(tokens), CHOICES[name])
    q = reference.chosen_from(reference.draft_logprobs_after(tokens), draft._replace(top_k=draft.top_k or WIDTH))
    left = np.maximum(p - q, 0)
    # Where rounding alone makes the one larger than the other, nothing is left in truth.
    left[left < 1e-6 * p] = 0
    assert misfit(model.tokens(at.contexts, places), left / left.sum()) < MOST


@pytest.mark.parametrize("name", ["plain", "both", "top-p within the tail"])
def test_second_token_after_an_accepted_draft_has_the_targets_distribution(name: str) -> None:
    """What follows an accepted draft is distributed as the target says after that draft."""
    model, choice = default_model(), CHOICES[name]
    text = default_tokenizer().encode("The old man said")
    at = going("The old man said", choice)
    emitted = verify(model, at, propose(model, at, 3))
    longer = emitted.counts > 1
    tokens, counts = np.unique(emitted.tokens[longer, 0], return_counts=True)
    checked = 0
    for token in tokens[np.argsort(-counts)][:4].tolist():
        mine = emitted.tokens[longer & (emitted.tokens[:, 0] == token), 1]
        chances = reference.chosen_from(reference.logprobs_after([*text, token]), choice)
        assert misfit(mine, chances) < MOST
        checked += mine.size
    assert checked > 5_000


def test_the_test_of_fit_tells_draft_and_target_apart() -> None:
    """What the draft proposes does not have the target's distribution, and the test of fit says so."""
    model, text = default_model(), "The old man said"
    at = going(text, Choice())
    proposed = propose(model, at, 1).tokens[:, 0]
    target = reference.chosen_from(reference.logprobs_after(default_tokenizer().encode(text)), Choice())
    draft = reference.chosen_from(reference.draft_logprobs_after(default_tokenizer().encode(text)), Choice(top_k=WIDTH))
    assert misfit(proposed, target) > 20 * MOST
    assert misfit(proposed, draft) < MOST


def test_drafts_are_accepted_as_often_as_they_can_be() -> None:
    """The share of accepted drafts is that which both models have in common, which no other way can exceed."""
    model, text = default_model(), default_tokenizer().encode("the end of the")
    at = going("the end of the", Choice())
    accepted = (verify(model, at, propose(model, at, 1)).counts - 1).mean()
    target = reference.chosen_from(reference.logprobs_after(text), Choice())
    draft = reference.chosen_from(reference.draft_logprobs_after(text), Choice(top_k=WIDTH))
    assert abs(accepted - np.minimum(target, draft).sum()) < 0.01


def test_greedy_is_the_most_probable_token() -> None:
    """At temperature 0 every token is the target's most probable one, with and without drafts."""
    model = default_model()
    for text in TEXTS:
        at = going(text, CHOICES["greedy"], rows=4)
        tokens = default_tokenizer().encode(text)
        emitted = verify(model, at, propose(model, at, 3))
        for token in emitted.tokens[0, : emitted.counts[0]].tolist():
            assert token == reference.ordered(reference.logprobs_after(tokens))[0]
            tokens.append(token)


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_chances_are_those_of_the_whole_distribution(choice: Choice) -> None:
    """The probability of any token, in a context's line or tail, is that of a plain computation."""
    model = default_model()
    tokens = np.arange(model.vocabulary_size)
    for text in TEXTS:
        at = going(text, choice, rows=tokens.size)
        places = model.places(at.contexts, tokens)
        chances = reference.chosen_from(reference.logprobs_after(default_tokenizer().encode(text)), choice)
        assert np.abs(chances_of(model, at.contexts, places, at.params) - chances).max() < 1e-5
        assert np.abs(masses_of(model, at.contexts, at.params).of_places(places) - chances).max() < 1e-5


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_extreme_temperatures_are_sound(temperature: float) -> None:
    """The coldest choice is the first token, and the hottest is any token alike, without a NaN or a warning."""
    model = default_model()
    at = going("The old man said", Choice(temperature=temperature), rows=400)
    emitted = verify(model, at, propose(model, at, 2))
    first = set(emitted.tokens[:, 0].tolist())
    if temperature < 1:
        assert first == {int(model.ids[at.contexts[0], 0])}
    else:
        assert len(first) > 300


def test_numbers_are_uniform_and_of_their_own() -> None:
    """Numbers spread evenly from 0 to below 1, and those of seeds, positions and purposes have nothing in common."""
    seeds = mixed(np.arange(300, dtype=np.uint64))[:, None]
    positions = np.arange(200)[None, :]
    drawn = {purpose: uniforms(seeds, positions, purpose) for purpose in (DRAFT, ACCEPT, FINAL)}
    for numbers in drawn.values():
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert misfit((numbers.ravel() * 64).astype(np.int64), np.full(64, 1 / 64)) < MOST
        assert abs(np.corrcoef(numbers[:, 0], numbers[:, 1])[0, 1]) < 0.2
    assert abs(np.corrcoef(drawn[DRAFT].ravel(), drawn[ACCEPT].ravel())[0, 1]) < 0.02
    assert np.unique(np.concatenate([numbers.ravel() for numbers in drawn.values()])).size == 3 * 300 * 200
