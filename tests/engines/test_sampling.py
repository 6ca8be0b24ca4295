"""Sampling and speculation: random numbers that seeds fix, distributions cut as asked, drafts that change no token."""

import numpy as np
import pytest

from tokenbus_engines.sampling import (
    ACCEPT,
    DRAFT,
    FINAL,
    Drafts,
    Floats,
    Ids,
    Logits,
    SamplingParams,
    Verified,
    distribution,
    drawn,
    uniforms,
    verified,
)

WORDS = 6
ROWS = 40_000
_GENERATOR = np.random.default_rng(11)


def probabilities(logits: Logits, wanted: SamplingParams) -> Floats:
    """Return the chances of columns that are one token each."""
    return distribution(logits, wanted).chances


def _verified(logits: Logits, drafts: Drafts, wanted: SamplingParams, positions: Ids) -> Verified:
    """Return what is made of drafts by a target with these logits."""
    return verified(distribution(logits, wanted), drafts, wanted, positions)


def params(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, rows: int = 1) -> SamplingParams:
    """Return the same params for some rows, whose seeds are counted."""
    return SamplingParams(
        np.full(rows, temperature), np.full(rows, top_k), np.full(rows, top_p), np.arange(rows, dtype=np.uint64)
    )


def plain(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Return the distribution as one would write it down: token by token."""
    weights = {token: np.exp((value - max(logits)) / temperature) for token, value in enumerate(logits)}
    ranked = sorted(weights, key=lambda token: (-weights[token], token))[: top_k or len(logits)]
    mass = sum(weights[token] for token in ranked)
    kept: list[int] = []
    for token in ranked:
        if sum(weights[other] for other in kept) < top_p * mass:
            kept.append(token)
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [0, 1, 3, 99])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
def test_distribution_is_cut_as_asked(temperature: float, top_k: int, top_p: float) -> None:
    """Temperature, then top-k, then top-p of what is left give what a plain loop gives, ties by the lower id."""
    logits = [0.5, 2.0, 2.0, -1.0, 2.0, 0.0, 1.25]
    found = probabilities(np.array([logits], np.float32), params(temperature, top_k, top_p))
    np.testing.assert_allclose(found[0], plain(logits, temperature, top_k, top_p), atol=1e-12)


def test_temperature_zero_is_the_most_probable_token() -> None:
    """Without temperature the most probable token is certain, of equal ones that with the lower id."""
    found = probabilities(np.array([[1.0, 3.0, 3.0, 2.0]], np.float32), params(0.0, 2, 0.5))
    assert found.tolist() == [[0, 1, 0, 0]]


def test_smallest_temperature_is_no_error() -> None:
    """The smallest temperature that a message can hold gives a distribution, not NaN."""
    smallest = float(np.finfo(np.float32).smallest_subnormal)
    found = probabilities(np.array([[1.0, 3.0, 2.0]], np.float32), params(smallest))
    assert found.tolist() == [[0, 1, 0]]


def test_rows_have_their_own_params() -> None:
    """A row's distribution is the same whatever its neighbours ask for (case 15)."""
    logits = np.random.default_rng(1).normal(size=(4, 3, 50)).astype(np.float32)
    mixed = SamplingParams(
        np.array([0.0, 1.0, 0.5, 2.0]),
        np.array([0, 5, 0, 1]),
        np.array([1.0, 1.0, 0.5, 0.9]),
        np.arange(4, dtype=np.uint64),
    )
    together = probabilities(logits, mixed)
    for row in range(4):
        alone = probabilities(logits[[row]], mixed.of(np.array([row])))
        np.testing.assert_array_equal(alone[0], together[row])


def test_what_is_impossible_is_never_drawn() -> None:
    """A token of no probability does not come, not even at the ends of chance."""
    distribution = np.array([[0.0, 0.25, 0.0, 0.75, 0.0]])
    almost_one = np.nextafter(1.0, 0.0)
    drawn_tokens = [int(drawn(distribution, np.array([chance]))[0]) for chance in (0.0, 0.2499, 0.25, almost_one)]
    assert drawn_tokens == [1, 1, 3, 3]


def test_chance_is_even_and_its_own() -> None:
    """Random numbers cover 0 to 1 evenly, and those of two purposes, positions or seeds have nothing in common."""
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


def _logits(shape: tuple[int, ...]) -> Logits:
    """Return logits of a few words, so that each is seen often."""
    return _GENERATOR.normal(scale=1.2, size=(*shape, WORDS)).astype(np.float32)


TARGET_FIRST, TARGET_AFTER = _logits(()), _logits((WORDS,))
DRAFT_FIRST, DRAFT_AFTER = _logits(()), _logits((WORDS,))


def drafts_of(wanted: SamplingParams, most: int) -> Drafts:
    """Draft from a table, as many for every row: the first token, and what follows each."""
    rows = wanted.seeds.size
    columns, chances = np.zeros((rows, most), np.int64), np.zeros((rows, most, WORDS))
    tokens = np.zeros(rows, np.int64)
    for place in range(most):
        logits = np.broadcast_to(DRAFT_FIRST, (rows, WORDS)) if not place else DRAFT_AFTER[tokens]
        chances[:, place] = probabilities(logits, wanted)
        columns[:, place] = tokens = drawn(chances[:, place], wanted.uniforms(np.full(rows, place), DRAFT))
    return Drafts(columns, chances, np.full(rows, most))


def first_two(wanted: SamplingParams, most: int) -> Ids:
    """Return the first two tokens of every row, with so many drafts; a row that got one gets another by itself."""
    drafts = drafts_of(wanted, most)
    rows = wanted.seeds.size
    logits = np.broadcast_to(TARGET_FIRST, (rows, most + 1, WORDS)).copy()
    for place in range(most):
        logits[:, place + 1] = TARGET_AFTER[drafts.columns[:, place]]
    found = _verified(logits, drafts, wanted, np.zeros(rows, np.int64))
    tokens = np.zeros((rows, 2), np.int64)
    tokens[:, : most + 1] = found.columns[:, :2]
    late = np.flatnonzero(found.counts < 2)
    none = Drafts(np.zeros((late.size, 0), np.int64), np.zeros((late.size, 0, WORDS)), 0 * late)
    ones = np.ones(late.size, np.int64)
    tokens[late, 1] = _verified(TARGET_AFTER[tokens[late, 0]][:, None], none, wanted.of(late), ones).columns[:, 0]
    return tokens


def distance(tokens: Ids, wanted: SamplingParams) -> float:
    """Return chi-square between how often each pair came, and how often the target's distribution says it does."""
    one = wanted.of(np.array([0]))
    first = probabilities(TARGET_FIRST[None], one)[0]
    after = np.array([probabilities(line[None], one)[0] for line in TARGET_AFTER])
    expected = (first[:, None] * after).reshape(-1) * tokens.shape[0]
    counts = np.bincount(tokens[:, 0] * WORDS + tokens[:, 1], minlength=WORDS**2)
    assert not counts[expected == 0].any()
    possible = expected > 0
    found: float = ((counts[possible] - expected[possible]) ** 2 / expected[possible]).sum()
    return found


def test_tokens_come_with_the_targets_probability() -> None:
    """Pairs of tokens are as frequent as the target says, with drafts and without: chi-square, 35 degrees, 0.001."""
    for most in (0, 1, 2):
        assert distance(first_two(params(), most), params()) < 66.6, most


def test_cut_distributions_are_kept_too() -> None:
    """The same holds with temperature, top-k and top-p, for the tokens that they leave."""
    wanted = params(temperature=1.5, top_k=4, top_p=0.9)
    for most in (0, 2):
        assert distance(first_two(wanted, most), wanted) < 37.7, most  # at most 16 pairs, so 15 degrees


def test_drafts_that_agree_are_all_kept() -> None:
    """Where drafts are drawn from the target's own distribution, every one is kept."""
    wanted = params(rows=500)
    drafts = drafts_of(wanted, 2)
    logits = np.log(np.concatenate([drafts.chances, drafts.chances[:, :1]], axis=1))
    assert (_verified(logits, drafts, wanted, np.zeros(500, np.int64)).counts == 3).all()


def test_without_temperature_drafts_are_kept_while_they_are_the_best() -> None:
    """At temperature 0 a draft is kept where it is the target's first choice, and else gives way to that."""
    tokens = np.array([[3, 4], [3, 5], [2, 4]])
    logits = np.zeros((3, 3, WORDS), np.float32)
    for place, best in enumerate((3, 4, 0)):
        logits[:, place, best] = 1
    certain = np.zeros((3, 2, WORDS))
    np.put_along_axis(certain, tokens[..., None], 1, axis=-1)
    wanted = params(temperature=0.0, rows=3)
    found = _verified(logits, Drafts(tokens, certain, np.array([2, 2, 2])), wanted, np.zeros(3, np.int64))
    kept = [line[:count].tolist() for line, count in zip(found.columns, found.counts, strict=True)]
    assert kept == [[3, 4, 0], [3, 4], [3]]


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """Some rows alone get what they get among many, also where the others have more drafts (case 15)."""
    wanted = params(rows=60)
    drafts = drafts_of(wanted, 2)
    counts = np.arange(60) % 3
    logits = _logits((60, 3))
    positions = np.arange(60)
    together = _verified(logits, drafts._replace(counts=counts), wanted, positions)
    for row in range(60):
        most = counts[row]
        alone = _verified(
            logits[[row], : most + 1],
            Drafts(drafts.columns[[row], :most], drafts.chances[[row], :most], counts[[row]]),
            wanted.of(np.array([row])),
            positions[[row]],
        )
        count = alone.counts[0]
        assert together.counts[row] == count
        assert together.columns[row, :count].tolist() == alone.columns[0, :count].tolist()
