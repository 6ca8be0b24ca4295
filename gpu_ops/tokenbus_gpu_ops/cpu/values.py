"""From logits to the numbers that the contract has for them, as the kernels do it."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tokenbus_gpu_ops.tensor import Tensor

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

FLOOR = np.float32(-9999.0)
"""What the contract writes for minus infinity, and so for anything below."""


def floats(logits: npt.NDArray[Any], dtype: str, into: Floats) -> Floats:
    """Return logits as floats: themselves where they are, else in the memory given, which must be as large."""
    if dtype == "float32":
        return logits
    room = into[: logits.size].reshape(logits.shape)
    if dtype == "bfloat16":
        np.left_shift(logits, 16, out=room.view(np.uint32), dtype=np.uint32)
    else:
        room[...] = logits
    return room


def values_of(logits: Floats, logs_of_sums: Doubles, *, as_logits: bool) -> Floats:
    """Return what is written for logits, given the logarithm of their row's sum of exponentials."""
    if as_logits:
        floored: Floats = np.maximum(logits, FLOOR)
        return floored
    exact = logits.astype(np.float64) - logs_of_sums
    values: Floats = np.maximum(np.minimum(exact, 0.0).astype(np.float32), FLOOR)
    return values


def row_of(logits: Tensor, row: int) -> Floats:
    """Return one whole row as floats."""
    values = logits.host_view()[row]
    return floats(values, logits.dtype, np.empty(values.size, np.float32))
