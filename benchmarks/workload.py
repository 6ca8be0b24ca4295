"""The steps that are measured: the same values for every peer, in the layout that its own engine has."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

VOCABULARY_SIZE = 151_936
MIXED = (0, 1, 5, 20)
"""What the rows of a mixed step ask for, each with the same chance."""
HEADLINE_ROWS, HEADLINE_TOKENS = 256, 3
_ROWS = (1, 16, HEADLINE_ROWS, 512)
TOP_KS = (0, 5, 20, None)
_WIDEST = 20


class Case(NamedTuple):
    """One size of step; `top_k` is None where the rows differ in it."""

    rows: int
    tokens_per_row: int
    top_k: int | None

    def __str__(self) -> str:
        return f"{self.rows} rows x {self.tokens_per_row}, k = {self.top_k_name}"

    @property
    def tokens(self) -> int:
        return self.rows * self.tokens_per_row

    @property
    def top_k_name(self) -> str:
        return "mixed" if self.top_k is None else str(self.top_k)

    @property
    def is_headline(self) -> bool:
        """Whether this is the size that the documents show."""
        return (self.rows, self.tokens_per_row) == (HEADLINE_ROWS, HEADLINE_TOKENS)


class Share(NamedTuple):
    """What one request gets from a step, as plain lists; the alternatives are one list a token."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    alternative_token_ids: list[list[int]]
    alternative_logprobs: list[list[float]]


@dataclass(frozen=True)
class Step:
    """One step as it lies in the engine's memory, before anything is timed.

    `columns` is what Tokenbus's own op emits. The rectangles are what FastDeploy's and vLLM's samplers emit: the
    sampled token in column 0, then as many alternatives as the row that wants most.
    """

    case: Case
    number: int
    keys: list[int]
    request_ids: list[str]
    top_ks: list[int]
    columns: dict[str, Array]
    rectangle_ids: Array
    rectangle_logprobs: Array
    ranks: Array


def cases(*, quick: bool) -> Iterator[Case]:
    """Yield the sizes to measure, the smallest first; a quick run has the headline size alone."""
    for rows in (HEADLINE_ROWS,) if quick else _ROWS:
        for top_k in TOP_KS if rows == HEADLINE_ROWS else (0, _WIDEST):
            yield Case(rows, HEADLINE_TOKENS, top_k)


def make_steps(case: Case, count: int, seed: int) -> list[Step]:
    """Return different steps of one size; the same seed gives the same steps."""
    random = np.random.default_rng(
        (seed, case.rows, case.tokens_per_row, _WIDEST + 1 if case.top_k is None else case.top_k)
    )
    return [_make_step(case, number + 1, random) for number in range(count)]


def truth(step: Step) -> list[Share]:
    """Return what every request must get, token by token from the engine's rectangles."""
    shares = []
    token = 0
    for top_k in step.top_ks:
        mine = range(token, token + step.case.tokens_per_row)
        shares.append(
            Share(
                [int(step.rectangle_ids[at, 0]) for at in mine],
                [float(step.rectangle_logprobs[at, 0]) for at in mine],
                [int(step.ranks[at]) for at in mine],
                [[int(value) for value in step.rectangle_ids[at, 1 : top_k + 1]] for at in mine],
                [[float(value) for value in step.rectangle_logprobs[at, 1 : top_k + 1]] for at in mine],
            )
        )
        token += step.case.tokens_per_row
    return shares


def _make_step(case: Case, number: int, random: np.random.Generator) -> Step:
    rows, tokens = case.rows, case.tokens
    ranked_ids, ranked_logprobs = _ranked(tokens, random)
    # The sampled token is most often the first; the last place stands for "not among the alternatives".
    place = np.minimum(random.geometric(0.6, tokens) - 1, _WIDEST)
    every = np.arange(tokens)
    ranks = (place + 1 + (place == _WIDEST) * random.integers(0, 1000, tokens)).astype("u4")
    top_ks = random.choice(MIXED, rows) if case.top_k is None else np.full(rows, case.top_k)
    most = int(top_ks.max())
    ids = np.column_stack([ranked_ids[every, place], ranked_ids[:, :most]])
    logprobs = np.column_stack([ranked_logprobs[every, place], ranked_logprobs[:, :most]])
    wanted = np.arange(most) < np.repeat(top_ks, case.tokens_per_row)[:, None]
    keys = random.integers(1, 2**63, rows, dtype="u8")
    bytes_of = {
        "statuses": 1,
        "token_counts": case.tokens_per_row,
        "draft_token_counts": case.tokens_per_row,
        "proposal_counts": 0,
        "scorings": 2,
    }
    columns = {
        "request_ids": keys,
        "batch_indices": np.arange(rows, dtype="u4"),
        "positions": random.integers(0, 4096, rows, dtype="u4"),
        **{name: np.full(rows, value, "u1") for name, value in bytes_of.items()},
        "top_ks": top_ks.astype("u1"),
        "token_ids": ids[:, 0].astype("u4"),
        "logprobs": logprobs[:, 0].copy(),
        "ranks": ranks,
        "alternative_token_ids": ids[:, 1:][wanted].astype("u4"),
        "alternative_logprobs": logprobs[:, 1:][wanted],
    }
    return Step(
        case,
        number,
        keys.tolist(),
        [f"cmpl-{random.bytes(16).hex()}" for _ in range(rows)],
        top_ks.tolist(),
        columns,
        ids,
        logprobs,
        ranks.astype("i8"),
    )


def _ranked(tokens: int, random: np.random.Generator) -> tuple[Array, Array]:
    """Return each token's most likely ids and their logprobs, the likeliest first: no id twice, no tie."""
    width = _WIDEST + 1
    first = random.integers(0, VOCABULARY_SIZE, (tokens, 1))
    stride = random.integers(1, VOCABULARY_SIZE // width, (tokens, 1))
    ids = (first + stride * np.arange(width)) % VOCABULARY_SIZE
    logprobs = -np.cumsum(random.uniform(0.01, 1.0, (tokens, width)), axis=1)
    return ids, logprobs.astype("f4")
