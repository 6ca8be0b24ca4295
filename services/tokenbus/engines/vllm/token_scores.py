"""TokenScores: the scores of `token_logprobs` in the form of vLLM's LogprobsLists."""

from collections.abc import Mapping, Sequence
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
"""Key of a request's extra scores in SamplingParams.extra_args."""
GIVEN = "tokenbus_prompt_token_ids"
"""Key of the ids to score at each position of the prompt."""


class Asked(NamedTuple):
    """Extra scores that a request asks for."""

    other_logprobs: bool = False
    entropies: bool = False
    mask_bound: int = 0
    token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> "Asked":
        """Read the extra scores from a request's `extra_args`."""
        other, entropies, mask_bound, *token_ids = (extra_args or {}).get(ASKED, (0, 0, 0))
        return cls(bool(other), bool(entropies), mask_bound, tuple(token_ids))


def as_argument(asked: TokenScoring) -> list[int]:
    """Return the requested extra scores as a value for `extra_args`."""
    return [int(asked.other_logprobs), int(asked.entropies), asked.mask_bound, *asked.token_ids]


def given_ids_of(extra_args: Mapping[str, Any] | None) -> Sequence[int]:
    """Return the ids to score in a request's prompt."""
    found: Sequence[int] = (extra_args or {}).get(GIVEN, ())
    return found


class TokenScores(NamedTuple):
    """The arrays of vLLM's LogprobsLists, and extra scores."""

    logprob_token_ids: Array
    logprobs: Array
    sampled_token_ranks: Array
    cu_num_generated_tokens: list[int] | None
    extras: Array | None
    """Extra scores of each line, in the form of `extra_lines`."""


def token_scores(found: TokenColumns, kept: Array | None = None, starts: list[int] | None = None) -> TokenScores:
    """Convert scores with equally many alternatives for every token. `kept` selects lines."""
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


def extra_lines(found: TokenColumns) -> Array:
    """Return extra scores, one line per token. Scores that the token's request did not ask for are zero."""
    counts, lines = found.token_counts, found.token_ids.size

    def of_tokens(column: Array) -> Array:
        return np.repeat(column, counts) if column.size else np.zeros(lines, column.dtype)

    kinds, given, bounds = (of_tokens(each) for each in (found.extras, found.given_counts, found.mask_bounds))
    sizes = _put(bounds > 0, found.mask_sizes)
    ids = _widened(found.given_token_ids, found.given_counts)
    columns = {
        "kinds": kinds,
        "other_logprobs": _put((kinds & Extra.OTHER_LOGPROB) > 0, found.other_logprobs),
        "entropies": _put((kinds & Extra.ENTROPY) > 0, found.entropies),
        "given_counts": given,
        "given_token_ids": np.repeat(ids, counts, axis=0) if ids.size else np.zeros((lines, 0), np.uint32),
        "given_logprobs": _widened(found.given_logprobs, given),
        "mask_bounds": bounds,
        "mask_sizes": sizes,
        "mask_token_ids": _widened(found.mask_token_ids, _listed(sizes, bounds)),
    }
    made = np.empty(lines, [(name, column.dtype, column.shape[1:]) for name, column in columns.items()])
    for name, column in columns.items():
        made[name] = column
    return made


def add_extras(made: StepArrays, lines: Array, scored: npt.NDArray[np.bool_], firsts: Array) -> None:
    """Add the extra scores to a step, where `firsts` has the index of each scored row's first line."""

    def of_rows(name: str) -> Array:
        every = np.zeros(scored.size, lines[name].dtype)
        every[scored] = lines[name][firsts]
        return every

    made.extras, made.given_counts, made.mask_bounds = map(of_rows, ("kinds", "given_counts", "mask_bounds"))
    made.other_logprobs = lines["other_logprobs"][(lines["kinds"] & Extra.OTHER_LOGPROB) > 0]
    made.entropies = lines["entropies"][(lines["kinds"] & Extra.ENTROPY) > 0]
    made.given_token_ids = _taken(lines["given_token_ids"][firsts], lines["given_counts"][firsts])
    made.given_logprobs = _taken(lines["given_logprobs"], lines["given_counts"])
    made.mask_sizes = lines["mask_sizes"][lines["mask_bounds"] > 0]
    made.mask_token_ids = _taken(lines["mask_token_ids"], _listed(lines["mask_sizes"], lines["mask_bounds"]))


def _listed(sizes: Array, bounds: Array) -> Array:
    """Return how many mask ids each line lists: the mask's size, or 0 if the size exceeds the line's bound."""
    return np.where(sizes <= bounds, sizes, 0)


def _taken(values: Array, counts: Array) -> Array:
    """Return the first `counts` elements of each line, concatenated."""
    taken: Array = values[mask_of(counts, values.shape[1])]
    return taken


def _widened(values: Array, counts: Array) -> Array:
    """Split values into rows of the given sizes, padded with zeros to the longest."""
    return _put(mask_of(counts, int(counts.max(initial=0))), values)


def _put(where: npt.NDArray[np.bool_], values: Array) -> Array:
    """Return an array that has the values in order wherever the mask is true, and zero elsewhere."""
    made = np.zeros(where.shape, values.dtype)
    made[where] = values
    return made
