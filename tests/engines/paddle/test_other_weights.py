"""PaddleEngine whose weights change while it runs."""

import shutil
from pathlib import Path

import pytest

from tests.engines.paddle.needs import NEEDS_PADDLE
from tests.engines.runs import Run, asked, paddle
from tokenbus.engines.paddle import PaddleEngine
from tokenbus.engines.paddle.weights import COMMITTED

pytestmark = NEEDS_PADDLE


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Return a folder with weights of which the embedding differs."""
    from safetensors import safe_open  # noqa: PLC0415 - only where paddle is
    from safetensors.numpy import save_file  # noqa: PLC0415 - as above

    with safe_open(COMMITTED, "numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    tensors["embedding.weight"] = tensors["embedding.weight"][::-1].copy()
    save_file(tensors, tmp_path / "model.safetensors", metadata)
    return tmp_path


def _load(run: Run, folder: Path) -> None:
    assert isinstance(run.engine, PaddleEngine)
    run.engine.load_weights(folder)


def _tokens(run: Run, key: int) -> list[int]:
    run.admit(asked(key, "The sun ", temperature=0.0, max_tokens=12, ignore_end_token=True, top_logprobs=0))
    return run.to_the_end().got[key].tokens


def test_other_weights_answer_as_an_engine_that_was_made_with_them(other: Path) -> None:
    run = paddle()
    before = _tokens(run, 1)
    _load(run, other)
    run.engine.weight_version = 6
    after = _tokens(run, 2)
    assert after == _tokens(paddle(weights=other / "model.safetensors"), 1)
    assert after != before
    assert {batch.header.weight_version for batches in run.batches for batch in batches} == {0, 6}
    shutil.copy(COMMITTED, other / "second.safetensors")
    with pytest.raises(ValueError, match=r"^load_weights.folder: a folder with one \*.safetensors, got 2: "):
        _load(run, other)
    (other / "second.safetensors").unlink()
    (other / "model.safetensors").write_bytes(b"none")
    with pytest.raises(ValueError, match=r"^load_weights.folder: weights .*: damaged, or no safetensors file"):
        _load(run, other)
    assert _tokens(run, 3) == after
