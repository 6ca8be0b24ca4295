"""PaddleEngine whose weights change while it runs."""

import shutil
from pathlib import Path

import pytest

from tests.engines.paddle.needs import NEEDS_PADDLE
from tests.engines.paddle.test_weights import save
from tests.engines.runs import Run, asked, paddle
from tokenbus.engines.paddle.weights import COMMITTED, load

pytestmark = NEEDS_PADDLE


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
