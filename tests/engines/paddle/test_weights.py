"""Weights: those that are committed, and what is said of a file that cannot be used."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.engines.paddle.needs import NEEDS_PADDLE
from tokenbus.engines.paddle import PaddleEngine, PaddleOptions, WeightsError
from tokenbus.engines.paddle.network import Shape
from tokenbus.engines.paddle.weights import COMMITTED, load

pytestmark = NEEDS_PADDLE

FORMAT = "tokenbus-paddle-1"
Arrays = dict[str, npt.NDArray[np.generic]]


def save(path: Path, arrays: Arrays, metadata: dict[str, str] | None = None) -> None:
    """Save the committed weights with some arrays and metadata changed; an empty array: left out."""
    from safetensors.numpy import save_file  # noqa: PLC0415 - of the extra, as paddle is

    committed = load(COMMITTED)
    mixed = {name: array for name, array in (committed.arrays | arrays).items() if array.size}
    sizes = {name: str(size) for name, size in asdict(committed.shape).items()}
    save_file(mixed, path, metadata={"format": FORMAT} | sizes | (metadata or {}))


def changed(path: Path, arrays: Arrays, metadata: dict[str, str] | None = None) -> str:
    """Return what is said of weights that were changed so."""
    save(path, arrays, metadata)
    return refusal(path)


def refusal(path: Path) -> str:
    """Return what is said of a file, without its name, which must come first."""
    with pytest.raises(WeightsError) as error:
        PaddleEngine(PaddleOptions(weights=path))
    name, said = str(error.value).split(": ", 1)
    assert name == f"weights {path}"
    assert "\n" not in said
    return said


def test_committed_weights_are_small_and_whole() -> None:
    weights = load(COMMITTED)
    assert COMMITTED.stat().st_size < 2_000_000
    assert weights.shape == Shape()
    assert all(np.isfinite(array).all() for array in weights.arrays.values())
    assert 300_000 < sum(array.size for array in weights.arrays.values()) < 1_000_000


def test_file_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    assert refusal(path) == "No such file or directory"
    assert refusal(tmp_path) == "Is a directory"
    whole = COMMITTED.read_bytes()
    for damaged in (whole[:-1], whole[:1000], b"", b"\xff" * 64):
        path.write_bytes(damaged)
        assert refusal(path).startswith("damaged, or no safetensors file: ")


def test_weight_that_does_not_fit_is_named(tmp_path: Path) -> None:
    path, name = tmp_path / "weights.safetensors", "blocks.1.expand.bias"
    empty = np.zeros(0, np.float16)
    assert changed(path, {name: empty}) == f"{name}: missing"
    assert changed(path, {"more": np.ones(2, np.float16)}) == "more: no weight of this network"
    assert changed(path, {name: np.ones(384, np.float32)}) == f"{name}: float16, got float32"
    assert changed(path, {name: np.ones(383, np.float16)}) == f"{name}: shape (384,), got (383,)"
    assert changed(path, {name: np.full(384, np.nan, np.float16)}) == f"{name}: finite numbers, got nan"


def test_file_of_something_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    assert changed(path, {}, {"format": "another-1"}) == f"format: {FORMAT}, got another-1"
    assert changed(path, {}, {"layers": "0"}) == "layers: a whole number from 1 to 4096, got 0"
    assert changed(path, {}, {"width": "many"}) == "width: a whole number from 1 to 4096, got many"
    assert changed(path, {}, {"width": "9" * 99}) == f"width: a whole number from 1 to 4096, got {'9' * 32}"
    assert changed(path, {}, {"attention_heads": "3"}) == "attention_heads: a divisor of width, 128, got 3"


def test_fingerprint_tells_weights_apart(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    data = bytearray(COMMITTED.read_bytes())
    path.write_bytes(data)
    assert load(path).fingerprint == load(COMMITTED).fingerprint
    data[-1] ^= 1
    path.write_bytes(data)
    assert load(path).fingerprint != load(COMMITTED).fingerprint
