"""What must come out, computed in float64 the plain way, and how near is near enough."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tokenbus_gpu_ops import TokenColumns

ABSOLUTE = 1e-5
RELATIVE = 1.2e-7
"""A logprob may be this far from float64's: sums of floats, and what a float32 of its size can hold."""
FLOOR = -9999.0

Doubles = npt.NDArray[np.float64]


def logs_of_sums(logits: Doubles) -> Doubles:
    """Return the logarithm of each row's sum of exponentials."""
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
    """Check ids and values of one token; where float32 has one number for two logits, the lower id comes first."""
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
