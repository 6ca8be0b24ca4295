"""What must come out, computed in float64 the plain way, and how near is near enough."""

from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_gpu_ops import TokenColumns
from tokenbus_gpu_ops.columns import EXTRA_COLUMNS

ABSOLUTE = 1e-5
RELATIVE = 1.2e-7
"""A logprob may be this far from float64's: sums of floats, and what a float32 of its size can hold."""
FLOOR = -9999.0

Doubles = npt.NDArray[np.float64]


def logs_of_sums(logits: Doubles) -> Doubles:
    largest = logits.max(axis=1, keepdims=True)
    sums: Doubles = largest[:, 0] + np.log(np.exp(logits - largest).sum(axis=1))
    return sums


def assert_right(
    result: TokenColumns, logits: npt.ArrayLike, ids: npt.ArrayLike, top_ks: npt.ArrayLike, *, as_logits: bool = False
) -> None:
    """Hold a result, one row a token, against the reference: ids and ranks exactly, values within the tolerance."""
    rows = np.asarray(logits, np.float64)
    sampled = np.asarray(ids)
    logs = np.zeros(len(rows)) if as_logits else logs_of_sums(rows)
    values = np.maximum(rows - logs[:, None], FLOOR)
    lines = np.arange(len(rows))
    assert result.faults == ()
    assert result.token_ids.tolist() == sampled.tolist()
    _assert_near(result.logprobs, values[lines, sampled])
    ranks = 1 + (rows > rows[lines, sampled][:, None]).sum(axis=1)
    assert result.ranks.tolist() == ranks.tolist()
    at = 0
    for row, top_k in zip(lines, np.broadcast_to(top_ks, len(rows)).tolist(), strict=True):
        got_ids = result.alternative_token_ids[at : at + top_k]
        got_values = result.alternative_logprobs[at : at + top_k]
        _assert_alternatives(got_ids, got_values, rows[row], values[row])
        at += top_k
    assert result.alternative_token_ids.size == at


def _assert_alternatives(ids: npt.NDArray[Any], got: npt.NDArray[Any], logits: Doubles, values: Doubles) -> None:
    order = np.lexsort((np.arange(logits.size), -logits))[: ids.size]
    _assert_near(got, values[order])
    _assert_near(got, values[ids])
    assert len(set(ids.tolist())) == ids.size
    if ids.size:
        pairs = list(zip((-got).tolist(), ids.tolist(), strict=True))
        assert pairs == sorted(pairs)
    elsewhere = ids != order
    steps = 4 * np.spacing(np.abs(got[elsewhere]))  # what rounding alone can make of two logits
    assert (np.abs(values[ids[elsewhere]] - values[order[elsewhere]]) <= steps).all()


def _assert_near(got: npt.NDArray[Any], wanted: Doubles) -> None:
    assert got.shape == wanted.shape
    assert (np.abs(got - wanted) <= ABSOLUTE + RELATIVE * np.abs(wanted)).all(), np.abs(got - wanted).max()


class Wanted(NamedTuple):
    """What a call with extras is asked for, request by request, as lists."""

    counts: list[int]
    other_logprobs: list[bool]
    entropies: list[bool]
    given: list[list[int]]
    mask_bounds: list[int]

    @classmethod
    def drawn(cls, rng: np.random.Generator, rows: int, vocabulary: int) -> "Wanted":
        counts: list[int] = []
        while sum(counts) < rows:
            counts.append(min(int(rng.integers(0, 5)), rows - sum(counts)))
        other, entropies = (rng.random((2, len(counts))) < 0.6).tolist()
        given = [rng.integers(0, vocabulary, rng.choice([0, 1, 128])).tolist() for _ in counts]
        return cls(counts, other, entropies, given, rng.choice([0, 1, 12, 1024], len(counts)).tolist())

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "token_counts": self.counts,
            "other_logprobs": self.other_logprobs,
            "entropies": self.entropies,
            "given_counts": [len(ids) for ids in self.given],
            "given_token_ids": np.array(list(chain.from_iterable(self.given)), np.int64),
            "mask_bounds": self.mask_bounds,
        }


def assert_extras(  # noqa: PLR0913, PLR0917 - what a call is
    result: TokenColumns,
    logits: npt.ArrayLike,
    ids: npt.ArrayLike,
    wanted: Wanted,
    other: npt.ArrayLike,
    masked: npt.ArrayLike,
    *,
    as_logits: bool = False,
) -> None:
    """Hold the extra columns against float64, token by token: rows of both tensors, and of that which has the masks."""
    rows, others, masks = (np.asarray(each, np.float64) for each in (logits, other, masked))
    values, other_values = (
        np.maximum(each if as_logits else each - logs_of_sums(each)[:, None], FLOOR) for each in (rows, others)
    )
    expected: dict[str, list[Any]] = {name: [] for name in EXTRA_COLUMNS}
    for other_logprobs, entropy, given, bound in zip(*wanted[1:], strict=True):
        expected["extras"].append(other_logprobs + 2 * entropy)
        expected["given_counts"].append(len(given))
        expected["mask_bounds"].append(bound)
        expected["given_token_ids"] += given
    for token, (request, sampled) in enumerate(
        zip(np.repeat(np.arange(len(wanted.counts)), wanted.counts).tolist(), np.asarray(ids).tolist(), strict=True)
    ):
        if wanted.other_logprobs[request]:
            expected["other_logprobs"].append(other_values[token, sampled])
        if wanted.entropies[request]:
            expected["entropies"].append(entropy_of(rows[token]))
        expected["given_logprobs"] += values[token, wanted.given[request]].tolist()
        if wanted.mask_bounds[request]:
            unmasked = np.flatnonzero(masks[token] > -np.inf).tolist()
            expected["mask_sizes"].append(len(unmasked))
            expected["mask_token_ids"] += unmasked if len(unmasked) <= wanted.mask_bounds[request] else []
    assert result.faults == ()
    for name, column in expected.items():
        found = getattr(result, name)
        if name in {"extras", "given_counts", "mask_bounds"} and not any(column):
            assert found.size == 0, name
        elif name == "entropies":
            exact = np.array(column)
            assert found.shape == exact.shape
            assert (np.abs(found - exact) <= ABSOLUTE + 1e-6 * exact).all(), np.abs(found - exact).max()
        elif found.dtype.kind == "f":
            _assert_near(found, np.array(column))
        else:
            assert found.tolist() == column, name


def entropy_of(logits: Doubles) -> float:
    exponents = logits - logits.max()
    powers = np.exp(exponents)
    mean = (powers[powers > 0] * exponents[powers > 0]).sum() / powers.sum()
    return float(np.log(powers.sum()) - mean)
