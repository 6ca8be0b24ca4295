"""The engine's own tensors, where paddle is installed: filled where they lie, and read from wherever they lie."""

from typing import Any

import numpy as np
import pytest

from tests.services.worker.fastdeploy import model
from tests.services.worker.fastdeploy.engine import Steps, outputs
from tests.services.worker.fastdeploy.test_round_trip import OPS, drawn
from tokenbus_services.worker import fastdeploy

paddle = pytest.importorskip("paddle", reason="paddle is not installed: its tensors cannot be tried")

WAIT = True


def tensors(values: Any) -> list[Any]:  # noqa: ANN401 - arguments by name
    """Return arguments with paddle's tensors in the place of arrays."""
    return [paddle.to_tensor(value) if isinstance(value, np.ndarray) else value for value in values]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("bus")
def test_paddle_tensors_are_saved_and_filled(op: str) -> None:
    """What is saved from paddle's tensors fills paddle's tensors, element by element as that engine's own ops do."""
    steps, get = Steps(31), OPS[op]
    own, expected = tensors(outputs(get)), outputs(get)
    k = [20] if get.endswith("_topk") else []
    for slots, columns in ((1, 3), (7, 21), (7, 1)):
        arguments = drawn(op, steps, slots, columns)
        given = dict(zip(arguments, tensors(arguments.values()), strict=True))
        getattr(fastdeploy, op)(*given.values())
        if "preempted_idx" in given:
            assert not given["preempted_idx"].numpy().any()
        getattr(fastdeploy, get)(*own, *k, 0, WAIT)
        getattr(model, get)(getattr(model, op)(arguments), *expected, *k)
        for found, wanted in zip(own, expected, strict=True):
            np.testing.assert_array_equal(found.numpy(), wanted)
