"""An array as the kernels and their twin see it: an address, a shape, strides and a type."""

import ctypes
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_VIEWS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),  # numpy has no such type; the twin makes floats of the bits
}


Looks = tuple[tuple[int, ...], tuple[int, ...], str, int | None]
"""Everything of an array but where it is: shape, strides, type and device."""


class Tensor(NamedTuple):
    """An array, wherever it is. Strides are in elements; `device` is None in the computer's own memory."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int | None
    owner: object
    """Keeps the elements where they are."""

    @classmethod
    def looking(cls, looks: Looks) -> "Tensor":
        """Return an array without memory, for callers that only look at its shape and type."""
        return cls(0, *looks, None)

    @property
    def looks(self) -> Looks:
        """Everything but where it is."""
        return self[1:5]

    def host_view(self) -> npt.NDArray[Any]:
        """Return the elements as an array of numpy's, where they are in the computer's own memory."""
        if isinstance(self.owner, np.ndarray):
            return self.owner
        dtype: np.dtype[Any] = _VIEWS[self.dtype] if self.dtype in _VIEWS else np.dtype(self.dtype)
        if 0 in self.shape:
            return np.empty(self.shape, dtype)
        reach = [(size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)]
        low, high = sum(step for step in reach if step < 0), sum(step for step in reach if step > 0)
        items = high - low + 1
        memory = (ctypes.c_byte * (items * dtype.itemsize)).from_address(self.address + low * dtype.itemsize)
        flat = np.frombuffer(memoryview(memory), dtype)
        strides = tuple(stride * dtype.itemsize for stride in self.strides)
        return np.lib.stride_tricks.as_strided(flat[-low:], self.shape, strides, writeable=False)


def from_numpy(values: npt.NDArray[Any]) -> Tensor:
    """Return where an array of numpy's is."""
    item = values.dtype.itemsize
    dtype = values.dtype.name if values.dtype.isnative else f"byte-swapped {values.dtype.name}"
    # An array whose strides are no multiples of its elements is a view of something else's fields.
    if any(step % item for step in values.strides):
        values = np.ascontiguousarray(values)
    strides = tuple(step // item for step in values.strides)
    return Tensor(values.ctypes.data, values.shape, strides, dtype, None, values)
