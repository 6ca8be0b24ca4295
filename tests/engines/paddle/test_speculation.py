"""Speculation: drafts make tokens come earlier, and change nothing else."""

import numpy as np
import numpy.typing as npt

from tokenbus_engines.paddle.speculation import (
    Drafts,
    Fronts,
    Logits,
    SamplingParams,
    drafted,
    probabilities,
    verified,
)

WORDS = 6
ROWS = 40_000
_GENERATOR = np.random.default_rng(11)


def _logits(shape: tuple[int, ...]) -> Logits:
    """Return logits of a few words, so that each is seen often."""
    return _GENERATOR.normal(scale=1.2, size=(*shape, WORDS)).astype(np.float32)


TARGET_FIRST, TARGET_AFTER = _logits(()), _logits((WORDS,))
DRAFT_FIRST, DRAFT_AFTER = _logits(()), _logits((WORDS,))


def same_params(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, rows: int = ROWS) -> SamplingParams:
    """Return one wish for rows whose seeds differ."""
    seeds = np.arange(rows, dtype=np.uint64)
    return SamplingParams(np.full(rows, temperature), np.full(rows, top_k), np.full(rows, top_p), seeds)


def further(place: int, state: None, tokens: npt.NDArray[np.int64]) -> tuple[None, Logits]:
    """Draft from a table: the first token, and what follows each."""
    return state, np.broadcast_to(DRAFT_FIRST, (tokens.size, WORDS)) if not place else DRAFT_AFTER[tokens]


def drafts_of(params: SamplingParams, most: int) -> Drafts:
    """Return as many drafts for every row."""
    rows = params.seeds.size
    zeros = np.zeros(rows, np.int64)
    return drafted(further, Fronts(None, zeros, zeros, np.full(rows, most)), params)


def first_two(params: SamplingParams, most: int) -> npt.NDArray[np.int64]:
    """Return the first two tokens of every row, with so many drafts; a row that got one gets another by itself."""
    drafts = drafts_of(params, most)
    rows = params.seeds.size
    logits = np.broadcast_to(TARGET_FIRST, (rows, most + 1, WORDS)).copy()
    for place in range(most):
        logits[:, place + 1] = TARGET_AFTER[drafts.tokens[:, place]]
    found = verified(logits, drafts, params, np.zeros(rows, np.int64))
    tokens = np.zeros((rows, 2), np.int64)
    tokens[:, : most + 1] = found.tokens[:, :2]
    late = np.flatnonzero(found.counts < 2)
    none = Drafts(np.zeros((late.size, 0), np.int64), np.zeros((late.size, 0, WORDS), np.float32), 0 * late)
    ones = np.ones(late.size, np.int64)
    tokens[late, 1] = verified(TARGET_AFTER[tokens[late, 0]][:, None], none, params.of(late), ones).tokens[:, 0]
    return tokens


def distance(tokens: npt.NDArray[np.int64], params: SamplingParams) -> float:
    """Return chi-square between how often each pair came, and how often the target's distribution says it does."""
    one = params.of(np.array([0]))
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
        assert distance(first_two(same_params(), most), same_params()) < 66.6, most


def test_cut_distributions_are_kept_too() -> None:
    """The same holds with temperature, top-k and top-p, for the tokens that they leave."""
    params = same_params(temperature=1.5, top_k=4, top_p=0.9)
    for most in (0, 2):
        assert distance(first_two(params, most), params) < 37.7, most  # at most 16 pairs, so 15 degrees


def test_drafts_that_agree_are_all_kept() -> None:
    """Where drafts are drawn from the target's own distribution, every one is kept."""
    params = same_params(rows=500)
    drafts = drafts_of(params, 2)
    logits = np.concatenate([drafts.logits, drafts.logits[:, :1]], axis=1)
    assert (verified(logits, drafts, params, np.zeros(500, np.int64)).counts == 3).all()


def test_without_temperature_drafts_are_kept_while_they_are_the_best() -> None:
    """At temperature 0 a draft is kept where it is the target's first choice, and else gives way to that."""
    tokens = np.array([[3, 4], [3, 5], [2, 4]])
    logits = np.zeros((3, 3, WORDS), np.float32)
    for place, best in enumerate((3, 4, 0)):
        logits[:, place, best] = 1
    certain = np.zeros((3, 2, WORDS), np.float32)
    np.put_along_axis(certain, tokens[..., None], 1, axis=-1)
    params = same_params(temperature=0.0, rows=3)
    found = verified(logits, Drafts(tokens, certain, np.array([2, 2, 2])), params, np.zeros(3, np.int64))
    kept = [line[:count].tolist() for line, count in zip(found.tokens, found.counts, strict=True)]
    assert kept == [[3, 4, 0], [3, 4], [3]]


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """Some rows alone get what they get among many, also where the others have more drafts (case 15)."""
    params = same_params(rows=60)
    drafts = drafts_of(params, 2)
    counts = np.arange(60) % 3
    logits = _logits((60, 3))
    positions = np.arange(60)
    together = verified(logits, drafts._replace(counts=counts), params, positions)
    for row in range(60):
        most = counts[row]
        alone = verified(
            logits[[row], : most + 1],
            Drafts(drafts.tokens[[row], :most], drafts.logits[[row], :most], counts[[row]]),
            params.of(np.array([row])),
            positions[[row]],
        )
        count = alone.counts[0]
        assert together.counts[row] == count
        assert together.tokens[row, :count].tolist() == alone.tokens[0, :count].tolist()
