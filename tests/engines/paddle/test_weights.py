"""Weights: those that are committed, files that cannot be used, and other weights while the engine runs."""

import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.engines.paddle.needs import NEEDS_PADDLE
from tests.engines.runs import Run, asked, paddle
from tokenbus.engines.paddle import PaddleEngine, PaddleOptions, WeightsError
from tokenbus.engines.paddle.weights import COMMITTED, Shape, load

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
    cases: list[tuple[Arrays, str]] = [
        ({name: empty}, f"{name}: missing"),
        ({"more": np.ones(2, np.float16)}, "more: unknown weight"),
        ({name: np.ones(384, np.float32)}, f"{name}: float16, got float32"),
        ({name: np.ones(383, np.float16)}, f"{name}: shape (384,), got (383,)"),
        ({name: np.full(384, np.nan, np.float16)}, f"{name}: finite numbers, got nan"),
    ]
    for arrays, line in cases:
        save(path, arrays)
        assert refusal(path) == line


def test_file_of_something_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    for name, value, line in (
        ("format", "another-1", f"{FORMAT}, got another-1"),
        ("layers", "0", "a whole number from 1 to 4096, got 0"),
        ("width", "many", "a whole number from 1 to 4096, got many"),
        ("width", "9" * 99, f"a whole number from 1 to 4096, got {'9' * 32}"),
        ("attention_heads", "3", "a divisor of width, 128, got 3"),
    ):
        save(path, {}, {name: value})
        assert refusal(path) == f"{name}: {line}"


def _tokens(run: Run, key: int) -> list[int]:
    run.admit(asked(key, "The sun ", temperature=0.0, max_tokens=12, ignore_end_token=True, top_logprobs=0))
    return run.to_the_end().got[key].tokens


def test_other_weights_answer_as_an_engine_that_was_made_with_them(tmp_path: Path) -> None:
    other, run = tmp_path, paddle()
    save(other / "model.safetensors", {"embedding.weight": load(COMMITTED).arrays["embedding.weight"][::-1].copy()})
    before = _tokens(run, 1)
    run.engine.load_weights(other)
    run.engine.weight_version = 6
    after = _tokens(run, 2)
    assert after == _tokens(paddle(weights=other / "model.safetensors"), 1)
    assert after != before
    assert {batch.header.weight_version for batches in run.batches for batch in batches} == {0, 6}
    shutil.copy(COMMITTED, other / "second.safetensors")
    with pytest.raises(ValueError, match=r"^load_weights.folder: a folder with one \*.safetensors, got 2: "):
        run.engine.load_weights(other)
    (other / "second.safetensors").unlink()
    (other / "model.safetensors").write_bytes(b"none")
    with pytest.raises(ValueError, match=r"^load_weights.folder: weights .*: damaged, or no safetensors file"):
        run.engine.load_weights(other)
    assert _tokens(run, 3) == after
