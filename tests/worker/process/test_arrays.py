"""A step's arrays as a record: every array of every type comes out as it went in, and what is none is refused."""

import random
from typing import Any

import numpy as np
import pytest

from tests.in_process.builders import arrays_of
from tokenbus.testing import batch, row_shapes
from tokenbus.worker import StepArrays
from tokenbus.worker.process import arrays
from tokenbus.worker.step import ARRAYS
from tokenbus_contracts import BatchKind, ContractError, SpeculativeMethod, StepPhase, ValueKind

MOST = 2**20
TYPES = ("u1", "i1", "?", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8")


def carried(step: StepArrays) -> StepArrays:
    found = arrays.hosted(step, MOST)
    room = memoryview(bytearray(found.size))
    arrays.write(step, step.step, found, room)
    return arrays.read(room)


def test_batch_of_a_step_is_the_same() -> None:
    step = arrays_of(batch(row_shapes([3, 4, 5], tokens=3), step=9))
    step.weight_version, step.parts = 2**40, 3
    found = carried(step)
    for name in ARRAYS:
        before, after = getattr(step, name), getattr(found, name)
        assert (before is None) == (after is None), name
        if before is not None:
            assert np.array_equal(before, after), name
            assert before.dtype == after.dtype
    for name in ("kind", "phase", "method", "value_kind", "step", "draft_follows", "weight_version", "parts"):
        assert getattr(found, name) == getattr(step, name), name
    assert isinstance(found.kind, BatchKind)
    assert isinstance(found.phase, StepPhase)
    assert isinstance(found.method, SpeculativeMethod)
    assert isinstance(found.value_kind, ValueKind)


@pytest.mark.parametrize("seed", range(6))
def test_arrays_of_any_type_and_shape(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - a test can be run again
    values: dict[str, Any] = {
        name: np.zeros(tuple(draw.randint(0, 4) for _ in range(draw.randint(1, 3))), draw.choice(TYPES))
        for name in ARRAYS
        if name in ("request_ids", "positions", "token_counts", "token_ids") or draw.random() < 0.7
    }
    for array in values.values():
        array.flat[:] = draw.getrandbits(7)
    found = carried(StepArrays(**values))
    for name in ARRAYS:
        given = getattr(found, name)
        assert (given is None) == (name not in values)
        if given is not None:
            assert given.shape == values[name].shape
            assert given.dtype == values[name].dtype
            assert np.array_equal(given, values[name])


def test_lists_are_arrays_and_ids_on_both_sides_of_2_63_stay_exact() -> None:
    keys, wide = [1, 2**64 - 1], np.arange(40, dtype=np.int64).reshape(4, 10)
    found = carried(StepArrays(request_ids=keys, positions=[0, 0], token_counts=[2, 2], token_ids=wide[::2, 1:3]))
    assert found.request_ids.tolist() == keys
    assert found.token_ids.tolist() == [[1, 2], [21, 22]]  # in order, though they had strides


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"token_ids": [[1], [2, 3]]}, "token_ids: an array, got "),
        ({"token_ids": ["a"]}, "token_ids: numbers, got str"),
        ({"token_ids": np.zeros((1, 1, 1, 1))}, "token_ids: at most 3 dimensions, got 4"),
        ({"kind": 9}, "kind: one of BatchKind, got 9"),
        ({"request_ids": None}, "request_ids: an array, got none"),
        ({"token_ids": np.zeros(MOST)}, f"step: at most {MOST} bytes of arrays, got "),
    ],
)
def test_what_cannot_be_carried_is_refused(values: dict[str, Any], message: str) -> None:
    step = StepArrays(**{"request_ids": [7], "positions": [0], "token_counts": [1], "token_ids": [1]} | values)
    with pytest.raises(ContractError) as raised:
        arrays.hosted(step, MOST)
    assert str(raised.value).startswith(message)
