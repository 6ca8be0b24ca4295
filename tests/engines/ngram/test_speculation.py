"""Speculation: tokens come as from the target alone, whatever the draft proposes."""

import numpy as np
import numpy.typing as npt
import pytest

from tests.engines.ngram import reference
from tests.engines.ngram.reference import Choice
from tokenbus.engines.ngram.engine import Drafted, propose
from tokenbus.engines.ngram.model import WIDTH, default_model
from tokenbus.engines.ngram.tokenizer import default_tokenizer
from tokenbus.engines.sampling import Ids, SamplingParams, distribution, verified

ROWS = 30_000
MOST = 4.0
"""How many standard deviations a fit may be off. Seeds are fixed: what passes once passes always."""
TEXT = "The old man said"
CHOICES = {
    "plain": Choice(),
    "top-k": Choice(top_k=4),
    "both": Choice(temperature=0.8, top_k=7, top_p=0.9),
    "hot top-p": Choice(temperature=2.5, top_p=0.85),
    "hot top-k": Choice(temperature=3.0, top_k=WIDTH + 60),
    "greedy": Choice(temperature=0.0),
}


def params_of(choice: Choice, rows: int = ROWS) -> SamplingParams:
    numbers = (np.full(rows, choice.temperature), np.full(rows, choice.top_k), np.full(rows, choice.top_p))
    return SamplingParams(*numbers, np.arange(rows, dtype=np.uint64))


def drafted(text: str, choice: Choice, count: int, rows: int = ROWS) -> Drafted:
    context = default_model().context_of(default_tokenizer().encode(text))
    return propose(default_model(), np.full(rows, context), params_of(choice, rows), np.full(rows, 3), count)


def emitted(text: str, choice: Choice, count: int, rows: int = ROWS, draft: Choice | None = None) -> tuple[Ids, Ids]:
    """Return what the target makes of so many drafts, drawn by another choice if one is given, and how many count."""
    model, made, params = default_model(), drafted(text, draft or choice, count, rows), params_of(choice, rows)
    target = distribution(model.logits[made.contexts], params, are_sorted=True)
    columns, counts = verified(target, made.drafts, params, np.full(rows, 3))
    # A column of a draft that its context does not have is never one of the counted.
    return model.ids[made.contexts, np.minimum(columns, WIDTH - 1)].astype(np.int64), counts


def chances_after(text: str, choice: Choice, token: int | None = None) -> reference.Floats:
    tokens = default_tokenizer().encode(text) + ([] if token is None else [token])
    return reference.chosen_from(reference.logprobs_after(tokens), choice)


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_first_token_has_the_targets_distribution(choice: Choice) -> None:
    for count in (0, 2) if choice == Choice() else (2,):
        assert misfit(emitted(TEXT, choice, count)[0][:, 0], chances_after(TEXT, choice)) < MOST


@pytest.mark.parametrize(
    ("text", "name", "draft"),
    [
        (" When it is", "plain", Choice(temperature=0.3)),
        (" When it is", "hot top-p", Choice(temperature=4.0)),
        (" end of the", "hot top-k", Choice(temperature=0.3)),
    ],
)
def test_a_draft_of_another_choice_changes_nothing(text: str, name: str, draft: Choice) -> None:
    """What the target gives beyond the draft is drawn exactly, also where the draft proposes what it lacks."""
    model, choice = default_model(), CHOICES[name]
    context = model.context_of(default_tokenizer().encode(text))
    assert (model.draft_columns[context] == WIDTH).sum() >= 4, "the target lacks some of the draft's tokens"
    assert misfit(emitted(text, choice, 1, draft=draft)[0][:, 0], chances_after(text, choice)) < MOST


@pytest.mark.parametrize("name", ["plain", "both"])
def test_second_token_after_an_accepted_draft_has_the_targets_distribution(name: str) -> None:
    choice = CHOICES[name]
    found, lengths = emitted(TEXT, choice, 3)
    longer = lengths > 1
    tokens, counts = np.unique(found[longer, 0], return_counts=True)
    checked = 0
    for token in tokens[np.argsort(-counts)][:4].tolist():
        mine = found[longer & (found[:, 0] == token), 1]
        assert misfit(mine, chances_after(TEXT, choice, token)) < MOST
        checked += mine.size
    assert checked > 5_000


def test_the_test_of_fit_tells_draft_and_target_apart() -> None:
    proposed = drafted(TEXT, Choice(), 1).tokens[:, 0]
    draft = reference.chosen_from(reference.draft_logprobs_after(default_tokenizer().encode(TEXT)), Choice(top_k=WIDTH))
    assert misfit(proposed, chances_after(TEXT, Choice())) > 20 * MOST
    assert misfit(proposed, draft) < MOST


def test_drafts_are_accepted_as_often_as_they_can_be() -> None:
    """The share of accepted drafts is that which both models have in common, which no other way can exceed."""
    text = "the end of the"
    share = (emitted(text, Choice(), 1)[1] - 1).mean()
    target, tokens = chances_after(text, Choice()), default_tokenizer().encode(text)
    draft = reference.chosen_from(reference.draft_logprobs_after(tokens), Choice(top_k=WIDTH))
    assert abs(share - np.minimum(target, draft).sum()) < 0.01


def test_extreme_temperatures_are_sound() -> None:
    cold, hot = (set(emitted(TEXT, Choice(temperature=each), 2, 400)[0][:, 0].tolist()) for each in (1e-30, 1e30))
    assert cold == {reference.ordered(reference.logprobs_after(default_tokenizer().encode(TEXT)))[0]}
    assert len(hot) == WIDTH


_LEAST_EXPECTED = 5.0


def misfit(tokens: npt.ArrayLike, chances: npt.NDArray[np.float64]) -> float:
    """Return how far tokens are from having been drawn with these chances, in standard deviations of a normal one.

    Cells in which little is expected are put together, and a token that has no chance is infinitely far.
    Wilson and Hilferty: the cube root of a chi-square over its degrees of freedom is nearly normal.
    """
    counts = np.bincount(np.asarray(tokens), minlength=chances.size).astype(np.float64)
    if counts[chances == 0].any():
        return float("inf")
    expected = chances * counts.sum()
    small = expected < _LEAST_EXPECTED
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = counts.size - 1
    if freedom == 0:
        return 0.0
    statistic = float(((counts - expected) ** 2 / expected).sum())
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / np.sqrt(spread))
