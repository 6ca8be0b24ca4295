"""Sampling and speculation: random numbers that seeds fix, distributions cut as asked, drafts that change no token."""

from itertools import product

import numpy as np

from tokenbus.engines.sampling import (
    ACCEPT,
    DRAFT,
    FINAL,
    Drafts,
    SamplingParams,
    distribution,
    drawn,
    uniforms,
    verified,
)

WORDS = 6


def of(params: SamplingParams, row: int) -> SamplingParams:
    cut = (params.temperatures[[row]], params.top_ks[[row]], params.top_ps[[row]], params.seeds[[row]])
    return SamplingParams(*cut)


def params(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, rows: int = 1) -> SamplingParams:
    """Return the same params for some rows, whose seeds are counted."""
    return SamplingParams(
        np.full(rows, temperature), np.full(rows, top_k), np.full(rows, top_p), np.arange(rows, dtype=np.uint64)
    )


def plain(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    weights = {token: np.exp((value - max(logits)) / temperature) for token, value in enumerate(logits)}
    ranked = sorted(weights, key=lambda token: (-weights[token], token))[: top_k or len(logits)]
    mass = sum(weights[token] for token in ranked)
    kept: list[int] = []
    for token in ranked:
        if sum(weights[other] for other in kept) < top_p * mass:
            kept.append(token)
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


def test_distribution_is_cut_as_asked() -> None:
    """Temperature, then top-k, then top-p of what is left give what a plain loop gives, ties by the lower id."""
    logits = [0.5, 2.0, 2.0, -1.0, 2.0, 0.0, 1.25]
    for temperature, top_k, top_p in product([0.25, 1.0, 3.0], [0, 1, 3, 99], [1.0, 0.9, 0.3, 1e-6]):
        found = distribution(np.array([logits], np.float32), params(temperature, top_k, top_p))
        np.testing.assert_allclose(found[0], plain(logits, temperature, top_k, top_p), atol=1e-12)


def test_temperature_zero_is_the_most_probable_token() -> None:
    """So is the smallest one, where no two are equal."""
    found = distribution(np.array([[1.0, 3.0, 3.0, 2.0]], np.float32), params(0.0, 2, 0.5))
    assert found.tolist() == [[0, 1, 0, 0]]
    smallest = float(np.finfo(np.float32).smallest_subnormal)
    assert distribution(np.array([[1.0, 3.0, 2.0]], np.float32), params(smallest)).tolist() == [[0, 1, 0]]


def test_rows_have_their_own_params() -> None:
    """A row's distribution is the same whatever its neighbours ask for (case 15)."""
    logits = np.random.default_rng(1).normal(size=(4, 3, 50)).astype(np.float32)
    columns = np.array([0.0, 1.0, 0.5, 2.0]), np.array([0, 5, 0, 1]), np.array([1.0, 1.0, 0.5, 0.9])
    mixed = SamplingParams(*columns, np.arange(4, dtype=np.uint64))
    together = distribution(logits, mixed)
    for row in range(4):
        alone = distribution(logits[[row]], of(mixed, row))
        np.testing.assert_array_equal(alone[0], together[row])


def test_what_is_impossible_is_never_drawn() -> None:
    distribution = np.array([[0.0, 0.25, 0.0, 0.75, 0.0]])
    almost_one = np.nextafter(1.0, 0.0)
    drawn_tokens = [int(drawn(distribution, np.array([chance]))[0]) for chance in (0.0, 0.2499, 0.25, almost_one)]
    assert drawn_tokens == [1, 1, 3, 3]


def test_chance_is_even_and_its_own() -> None:
    seeds = np.arange(4000, dtype=np.uint64)
    position = np.full(4000, 7)
    columns = [
        uniforms(seeds, position, DRAFT),
        uniforms(seeds, position, ACCEPT),
        uniforms(seeds, position, FINAL),
        uniforms(seeds, position + 1, DRAFT),
        uniforms(seeds + np.uint64(2**63), position, DRAFT),
    ]
    for column in columns:
        assert column.min() >= 0
        assert column.max() < 1
        counts = np.histogram(column, bins=20, range=(0, 1))[0]
        assert ((counts - 200) ** 2 / 200).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    correlations = np.corrcoef(columns) - np.eye(5)
    assert np.abs(correlations).max() < 0.06
    np.testing.assert_array_equal(columns[0], uniforms(seeds, position, DRAFT))


def test_without_temperature_drafts_are_kept_while_they_are_the_best() -> None:
    tokens = np.array([[3, 4], [3, 5], [2, 4]])
    logits = np.zeros((3, 3, WORDS), np.float32)
    for place, best in enumerate((3, 4, 0)):
        logits[:, place, best] = 1
    certain = np.zeros((3, 2, WORDS))
    np.put_along_axis(certain, tokens[..., None], 1, axis=-1)
    wanted = params(temperature=0.0, rows=3)
    found = verified(
        distribution(logits, wanted), Drafts(tokens, certain, np.array([2, 2, 2])), wanted, np.zeros(3, np.int64)
    )
    kept = [line[:count].tolist() for line, count in zip(found.columns, found.counts, strict=True)]
    assert kept == [[3, 4, 0], [3, 4], [3]]
