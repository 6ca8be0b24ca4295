"""Arrays of frameworks that are installed, on the CPU: read where they are, in the types that numpy lacks too."""

import warnings
from typing import Any

import numpy as np
import pytest

from tests.gpu_ops.logits import DTYPES, random, rounded
from tests.gpu_ops.reference import assert_right
from tokenbus_gpu_ops import token_logprobs


@pytest.fixture(scope="module")
def paddle() -> Any:  # noqa: ANN401 - a module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of compilers that no test needs
        return pytest.importorskip("paddle", reason="not run: Paddle is not installed here")


@pytest.fixture(scope="module")
def torch() -> Any:  # noqa: ANN401
    return pytest.importorskip("torch", reason="not run: PyTorch is not installed here")


@pytest.mark.parametrize("release", ["3", "2.6"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_paddle(paddle: Any, dtype: str, release: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN401
    """Paddle's logits and ids do, of every type, views with gaps between the rows too, and by `to_dlpack` before 3."""
    for name in ("__dlpack__", "__dlpack_device__") if release == "2.6" else ():
        monkeypatch.delattr(paddle.Tensor, name)
    rng = np.random.default_rng(1)
    logits = rounded(random(rng, 6, 999), dtype)
    ids = rng.integers(0, 999, 6)
    tensor = paddle.to_tensor(logits, place=paddle.CPUPlace()).astype(dtype)
    their_ids = paddle.to_tensor(ids, place=paddle.CPUPlace())
    assert_right(token_logprobs(tensor, their_ids, 7), logits, ids, 7)
    assert_right(token_logprobs(tensor[::2], their_ids[::2], 7), logits[::2], ids[::2], 7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_torch(torch: Any, dtype: str) -> None:  # noqa: ANN401
    """PyTorch's logits and ids do, of every type, views with gaps between the rows too."""
    rng = np.random.default_rng(2)
    logits = rounded(random(rng, 6, 999), dtype)
    ids = rng.integers(0, 999, 6)
    tensor = torch.from_numpy(logits).to(getattr(torch, dtype))
    assert_right(token_logprobs(tensor, torch.from_numpy(ids), 7), logits, ids, 7)
    assert_right(token_logprobs(tensor[::2, 3:900], [4, 5, 6], 7), logits[::2, 3:900], [4, 5, 6], 7)
