"""TokenScores: what `token_logprobs` says of a step's tokens, in the place of vLLM's LogprobsLists. Numpy alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus.engines.engine import mask_of
from tokenbus.worker import StepArrays
from tokenbus_contracts.extras import Extra
from tokenbus_contracts.generated.request_pb2 import TokenScoring
from tokenbus_gpu_ops.columns import TokenColumns

Array = npt.NDArray[Any]

ASKED = "tokenbus_token_scoring"
"""Under which name the `extra_args` of vLLM's SamplingParams have what a request asks for beside its logprobs."""
GIVEN = "tokenbus_prompt_token_ids"
"""And the ids whose logprobs it asks for at each position of its prompt."""


class Asked(NamedTuple):
    """What a request asks for beside its logprobs."""

    other_logprobs: bool = False
    entropies: bool = False
    mask_bound: int = 0
    token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> "Asked":
        """Return it from a request's arguments."""
        other, entropies, mask_bound, *token_ids = (extra_args or {}).get(ASKED, (0, 0, 0))
        return cls(bool(other), bool(entropies), mask_bound, tuple(token_ids))


def as_argument(asked: TokenScoring) -> list[int]:
    """Return what a request asks for as an argument of vLLM's."""
    return [int(asked.other_logprobs), int(asked.entropies), asked.mask_bound, *asked.token_ids]


def given_ids_of(extra_args: Mapping[str, Any] | None) -> Sequence[int]:
    """Return the ids whose logprobs a request asks for in its prompt."""
    found: Sequence[int] = (extra_args or {}).get(GIVEN, ())
    return found


@dataclass(slots=True, kw_only=True)
class ExtraLines:
    """What some requests asked for beside, of each of a step's lines; zeros for those that did not."""

    kinds: Array
    other_logprobs: Array
    entropies: Array
    given_counts: Array
    given_token_ids: Array
    """With one dimension more, as `given_logprobs`: as wide as the longest list."""
    given_logprobs: Array
    mask_bounds: Array
    mask_sizes: Array
    mask_token_ids: Array
    """With one dimension more: as wide as the largest mask that is listed."""

    def __getitem__(self, lines: Array) -> "ExtraLines":
        return ExtraLines(**{each.name: getattr(self, each.name)[lines] for each in fields(self)})


class TokenScores(NamedTuple):
    """Arrays as those of LogprobsLists, under the same names, and what was asked for beside."""

    logprob_token_ids: Array
    logprobs: Array
    sampled_token_ranks: Array
    cu_num_generated_tokens: list[int] | None
    extras: ExtraLines | None


def token_scores(found: TokenColumns, kept: Array | None = None, starts: list[int] | None = None) -> TokenScores:
    """Return a call's results, of tokens that all have as many alternatives; `kept` says which lines there are."""
    lines = found.token_ids.size
    width = found.alternative_token_ids.size // max(1, lines)
    every = slice(None) if kept is None else kept

    def beside(first: Array, others: Array) -> Array:
        return np.concatenate((first[:, None], others.reshape(lines, width)), axis=1)[every]

    extras = extra_lines(found) if found.extra_columns else None
    return TokenScores(
        beside(found.token_ids, found.alternative_token_ids),
        beside(found.logprobs, found.alternative_logprobs),
        found.ranks[every],
        starts,
        extras if kept is None or extras is None else extras[kept],
    )


def extra_lines(found: TokenColumns) -> ExtraLines:
    """Return a line for each token of a call."""
    counts, lines = found.token_counts, found.token_ids.size

    def of_tokens(column: Array) -> Array:
        return np.repeat(column, counts) if column.size else np.zeros(lines, column.dtype)

    kinds, given, bounds = (of_tokens(each) for each in (found.extras, found.given_counts, found.mask_bounds))
    sizes = _put(bounds > 0, found.mask_sizes)
    ids = _widened(found.given_token_ids, found.given_counts)
    return ExtraLines(
        kinds=kinds,
        other_logprobs=_put((kinds & Extra.OTHER_LOGPROB) > 0, found.other_logprobs),
        entropies=_put((kinds & Extra.ENTROPY) > 0, found.entropies),
        given_counts=given,
        given_token_ids=np.repeat(ids, counts, axis=0) if ids.size else np.zeros((lines, 0), np.uint32),
        given_logprobs=_widened(found.given_logprobs, given),
        mask_bounds=bounds,
        mask_sizes=sizes,
        mask_token_ids=_widened(found.mask_token_ids, _listed(sizes, bounds)),
    )


def add_extras(made: StepArrays, lines: ExtraLines, scored: npt.NDArray[np.bool_], firsts: Array) -> None:
    """Add what scored rows asked for beside to their step; `firsts` has the place of each one's first line."""

    def of_rows(column: Array) -> Array:
        every = np.zeros(scored.size, column.dtype)
        every[scored] = column[firsts]
        return every

    made.extras, made.given_counts, made.mask_bounds = map(
        of_rows, (lines.kinds, lines.given_counts, lines.mask_bounds)
    )
    made.other_logprobs = lines.other_logprobs[(lines.kinds & Extra.OTHER_LOGPROB) > 0]
    made.entropies = lines.entropies[(lines.kinds & Extra.ENTROPY) > 0]
    made.given_token_ids = _taken(lines.given_token_ids[firsts], lines.given_counts[firsts])
    made.given_logprobs = _taken(lines.given_logprobs, lines.given_counts)
    made.mask_sizes = lines.mask_sizes[lines.mask_bounds > 0]
    made.mask_token_ids = _taken(lines.mask_token_ids, _listed(lines.mask_sizes, lines.mask_bounds))


def _listed(sizes: Array, bounds: Array) -> Array:
    """Return how many ids each line's mask has, none where it is too large to tell."""
    return np.where(sizes <= bounds, sizes, 0)


def _taken(values: Array, counts: Array) -> Array:
    """Return the first elements of each line, as many as it has."""
    taken: Array = values[mask_of(counts, values.shape[1])]
    return taken


def _widened(values: Array, counts: Array) -> Array:
    """Return lines as wide as the longest, each with as many of the values as it has, and zeros behind them."""
    return _put(mask_of(counts, int(counts.max(initial=0))), values)


def _put(where: npt.NDArray[np.bool_], values: Array) -> Array:
    """Return zeros with values at some places, in their order."""
    made = np.zeros(where.shape, values.dtype)
    made[where] = values
    return made
