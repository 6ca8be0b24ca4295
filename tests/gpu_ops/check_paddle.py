"""Check on a card that paddle's own tensors are taken everywhere: `python -m tests.gpu_ops.check_paddle`.

For paddlepaddle-gpu, which no test environment has: put its wheel's folder on PYTHONPATH. Release 2.6 knows no
`__dlpack__`, and has no kernels for newer cards, where they compute anything; so everything here is made by numpy and
copied. Prints a line for each check, and ends with 1 where one failed.
"""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.engines.fastdeploy.bus import save, speaking
from tests.engines.fastdeploy.engine import Steps, outputs
from tests.engines.fastdeploy.theirs import GETS
from tests.gpu_ops.logits import random
from tests.gpu_ops.reference import assert_right
from tokenbus.engines import fastdeploy
from tokenbus.worker import StepArrays, StepAssembler
from tokenbus_contracts import Limits, LogprobBatch, encode
from tokenbus_gpu_ops import token_logprobs

Check = tuple[str, Callable[[], None]]
_SIZES = ((1, 99), (7, 1000), (64, 32_000), (256, 151_936))
_TYPES = ("float32", "float16")


def _paddle() -> Any:  # noqa: ANN401 - a module
    import paddle
    import paddle.utils.dlpack

    return paddle


def _there(paddle: Any, values: Any) -> Any:  # noqa: ANN401
    """Return an array as a tensor on the card, anything else as it is."""
    if not isinstance(values, np.ndarray):
        return values
    return paddle.to_tensor(values, place=paddle.CUDAPlace(0))


def checks(paddle: Any) -> Iterator[Check]:  # noqa: ANN401
    for dtype in _TYPES:
        for rows, vocabulary in _SIZES:
            yield f"token_logprobs {dtype} {rows} x {vocabulary}", _logprobs(paddle, dtype, rows, vocabulary)
    yield "StepAssembler", lambda: _assemble(paddle)
    for op in GETS:
        yield op, _op(paddle, op)


def _logprobs(paddle: Any, dtype: str, rows: int, vocabulary: int) -> Callable[[], None]:  # noqa: ANN401
    def check() -> None:
        rng = np.random.default_rng(rows)
        logits, ids = random(rng, rows, vocabulary).astype(dtype), rng.integers(0, vocabulary, rows)
        found = token_logprobs(_there(paddle, logits), _there(paddle, ids), 20)
        assert_right(found, logits.astype(np.float32), ids, 20)

    return check


def _assemble(paddle: Any) -> None:  # noqa: ANN401
    arrays: dict[str, Any] = {
        "request_keys": np.array([7, 8]),
        "positions": np.array([0, 4]),
        "token_counts": np.array([2, 1], np.int32),
        "token_ids": np.array([[5, 6], [9, 0]]),
        "logprobs": np.array([[-1, -2], [-0.5, 0]], np.float32),
        "ranks": np.array([[1, 1], [1, 0]]),
        "index_to_batch_id": np.array([1, 0], np.int32),
    }
    assembler = StepAssembler(Limits.default())
    given = {name: _there(paddle, array) for name, array in arrays.items()}
    found, expected = (assembler.assemble(StepArrays(step=1, **each))[0] for each in (given, arrays))
    encode(LogprobBatch.of_views(found.header._replace(worker_id="w"), found.columns))
    for name, column in expected.columns.items():
        np.testing.assert_array_equal(found.columns[name], column, name)


def _op(paddle: Any, op: str) -> Callable[[], None]:  # noqa: ANN401
    """Return the check that tensors on the card are taken and filled as arrays are, which other tests hold right."""

    def check() -> None:
        steps, get = Steps(31), GETS[op]
        own, expected = [_there(paddle, each) for each in outputs(get)], outputs(get)
        k = [20] if get.endswith("_topk") else []
        for slots, columns in ((1, 3), (64, 21), (256, 1)):
            arguments = steps.drawn(op, slots, columns)
            save(op, arguments)
            given = {name: _there(paddle, value) for name, value in arguments.items()}
            getattr(fastdeploy, op)(*given.values())
            if "preempted_idx" in given:
                assert not given["preempted_idx"].numpy().any()
            for into in (expected, own):
                getattr(fastdeploy, get)(*into, *k, 0, True)  # noqa: FBT003 - by that engine's positions
            for found, wanted in zip(own, expected, strict=True):
                np.testing.assert_array_equal(found.numpy(), wanted)

    return check


def main() -> int:
    """Do every check, and say what came of it."""
    paddle = _paddle()
    has_dlpack = hasattr(paddle.Tensor, "__dlpack__")
    sys.stdout.write(f"paddle {paddle.__version__}, __dlpack__: {has_dlpack}, numpy {np.__version__}\n")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="tb") as folder, speaking("develop", Path(folder)):
        os.chdir(folder)
        for name, check in checks(paddle):
            try:
                check()
                sys.stdout.write(f"right   {name}\n")
            except Exception:  # noqa: BLE001 - whatever it is, the others are checked
                failed += 1
                sys.stdout.write(f"WRONG   {name}\n{traceback.format_exc()}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
