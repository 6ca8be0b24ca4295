"""Logits of every kind that has made a difference, as float32 that each type of logits can hold."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Maker = Callable[[np.random.Generator, int, int], Floats]

DTYPES = ("float32", "float16", "bfloat16")


def rounded(values: Floats, dtype: str) -> Floats:
    if dtype == "float32":
        return values
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    return bits_of_bfloat16(values).astype(np.uint32).__lshift__(16).view(np.float32)


def bits_of_bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def random(rng: np.random.Generator, rows: int, width: int) -> Floats:
    return rng.normal(0, 3, (rows, width)).astype(np.float32)


def peaked(rng: np.random.Generator, rows: int, width: int) -> Floats:
    logits = random(rng, rows, width)
    for row in logits:
        row[rng.integers(0, width, 5)] += np.float32(20)
    return logits


def equal(rng: np.random.Generator, rows: int, width: int) -> Floats:
    return np.repeat(rng.normal(0, 3, (rows, 1)).astype(np.float32), width, axis=1)


def masked(rng: np.random.Generator, rows: int, width: int) -> Floats:
    logits = random(rng, rows, width)
    logits[rng.random((rows, width)) > 12 / width] = -np.inf
    logits[np.arange(rows), rng.integers(0, width, rows)] = 1
    return logits


def all_but_one(rng: np.random.Generator, rows: int, width: int) -> Floats:
    logits = np.full((rows, width), -np.inf, np.float32)
    logits[np.arange(rows), rng.integers(0, width, rows)] = 1
    return logits


def huge(rng: np.random.Generator, rows: int, width: int) -> Floats:
    return np.clip(rng.normal(0, 1, (rows, width)) * 1e38, -3e38, 3e38).astype(np.float32)


def far_below(rng: np.random.Generator, rows: int, width: int) -> Floats:
    return (-(2.0 + rng.random((rows, width))) * 1e37).astype(np.float32)


def tiny(rng: np.random.Generator, rows: int, width: int) -> Floats:
    """Return numbers that are different, and whose logprobs are not."""
    return rng.normal(0, 1e-9, (rows, width)).astype(np.float32)


def ascending(rng: np.random.Generator, rows: int, width: int) -> Floats:
    """Return rows that rise: each logit is the largest so far."""
    del rng
    return np.repeat(np.linspace(-10, 10, width, dtype=np.float32)[None, :], rows, axis=0)


def descending(rng: np.random.Generator, rows: int, width: int) -> Floats:
    return np.ascontiguousarray(ascending(rng, rows, width)[:, ::-1])


def crowded(rng: np.random.Generator, rows: int, width: int) -> Floats:
    """Return rows whose large logits are all where few threads of a block look."""
    logits = random(rng, rows, width)
    logits[:, np.arange(width) // 8 % 256 < 19] += np.float32(50)
    return logits


def zeros(rng: np.random.Generator, rows: int, width: int) -> Floats:
    """Return zeros of both signs, which are the same number."""
    return np.where(rng.random((rows, width)) < 0.5, np.float32(0), np.float32(-0.0))


KINDS: dict[str, Maker] = {
    maker.__name__: maker
    for maker in (random, peaked, equal, masked, all_but_one, tiny, ascending, descending, crowded, zeros)
}
FAR_KINDS: dict[str, Maker] = {maker.__name__: maker for maker in (huge, far_below)}
"""Beyond what float16 holds."""
