"""The engine's own tensors, where paddle is installed: filled where they lie, and read from wherever they lie."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.engines.fastdeploy import kernel
from tests.engines.fastdeploy.bus import same_bytes
from tests.engines.fastdeploy.engine import Steps, outputs
from tests.engines.fastdeploy.theirs import GETS
from tokenbus.engines import fastdeploy
from tokenbus_contracts import ContractError

paddle = pytest.importorskip("paddle", reason="paddle is not installed: its tensors cannot be tried")


def tensors(values: Any) -> list[Any]:  # noqa: ANN401 - arguments by name
    return [paddle.to_tensor(value) if isinstance(value, np.ndarray) else value for value in values]


@pytest.mark.usefixtures("bus")
def test_tensor_that_numpy_has_no_type_for_is_refused() -> None:
    given = Steps(31).drawn("save_output", 2) | {"sampled_token_ids": paddle.ones([2, 1]).astype("bfloat16")}
    with pytest.raises(ContractError, match=r"^save_output.sampled_token_ids: a type that numpy has, got bfloat16$"):
        fastdeploy.save_output(*given.values())


@pytest.fixture
def views() -> Iterator[None]:
    """Slices are views, as paddle has them by itself; the paddle engine turns that off for its process."""
    name = "FLAGS_use_stride_kernel"
    before = paddle.get_flags([name])
    paddle.set_flags({name: True})
    yield
    paddle.set_flags(before)


@pytest.mark.usefixtures("bus", "views")
def test_view_that_is_not_contiguous_is_refused() -> None:
    whole, flags = paddle.arange(2 * 514).reshape([514, 2]), paddle.ones([2, 2], dtype="int32")
    with pytest.raises(ContractError) as refused:
        fastdeploy.get_output(whole[:, :1], 0, False)  # noqa: FBT003 - by that engine's positions
    wanted = "a tensor of paddle or an array of numpy to write to, got a view that is not contiguous"
    assert str(refused.value) == f"get_output.output_tokens: {wanted}"
    with pytest.raises(ContractError) as refused:
        fastdeploy.save_output(*(Steps(31).drawn("save_output", 2) | {"preempted_idx": flags[:, :1]}).values())
    assert str(refused.value) == f"save_output.preempted_idx: {wanted}"
    assert flags.numpy().all()


@pytest.mark.parametrize("op", GETS)
@pytest.mark.usefixtures("bus")
def test_paddle_tensors_are_saved_and_filled(op: str) -> None:
    """Those of paddle 2.6, without `__dlpack__`, are as the `Tensor` of test_differential.py."""
    steps, get = Steps(31), GETS[op]
    own, expected = tensors(outputs(get)), outputs(get)
    k = [20] if get.endswith("_topk") else []
    with kernel.queue() as queue:
        for slots, columns in ((1, 3), (7, 21), (7, 1), (0, 2)):
            arguments = steps.drawn(op, slots, columns)
            given = dict(zip(arguments, tensors(arguments.values()), strict=True))
            getattr(fastdeploy, op)(*given.values())
            if "preempted_idx" in given:
                assert not given["preempted_idx"].numpy().any()
            getattr(fastdeploy, get)(*own, *k, 0, True)  # noqa: FBT003 - by that engine's positions
            queue.save(op, arguments)
            undefined = queue.get(expected)
            for at, (found, wanted) in enumerate(zip(own, expected, strict=True)):
                same_bytes(get, at, found.numpy(), wanted, undefined)
