"""Tensor: the address, shape, strides and type of an array of numpy or DLPack."""

import ctypes
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.errors import ContractError, Rule

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
_HOST = (CPU, CUDA_HOST)
_GPU = (CUDA, CUDA_MANAGED)
_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}
_VIEWS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),  # numpy has no bfloat16, so the CPU path converts the bits
}


Looks = tuple[tuple[int, ...], tuple[int, ...], str, int | None]
"""The shape, strides, type and device of an array, without its address."""


class Tensor(NamedTuple):
    """An array on any device. Strides are counted in elements. `device` is None for host memory."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int | None
    owner: object
    """An object that keeps the memory alive."""

    @classmethod
    def looking(cls, looks: Looks) -> "Tensor":
        """Return a tensor without memory, for checks of shape and type."""
        return cls(0, *looks, None)

    @property
    def looks(self) -> Looks:
        return self[1:5]

    def host_view(self) -> npt.NDArray[Any]:
        if isinstance(self.owner, np.ndarray):
            return self.owner
        dtype: np.dtype[Any] = _VIEWS[self.dtype] if self.dtype in _VIEWS else np.dtype(self.dtype)
        if 0 in self.shape:
            return np.empty(self.shape, dtype)
        reach = [(size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)]
        low, high = sum(step for step in reach if step < 0), sum(step for step in reach if step > 0)
        items = high - low + 1
        memory = (ctypes.c_byte * (items * dtype.itemsize)).from_address(self.address + low * dtype.itemsize)
        strides = tuple(stride * dtype.itemsize for stride in self.strides)
        view = np.ndarray(self.shape, dtype, memoryview(memory), -low * dtype.itemsize, strides)
        view.flags.writeable = False
        return view


def from_numpy(values: npt.NDArray[Any]) -> Tensor:
    item = values.dtype.itemsize
    dtype = values.dtype.name if values.dtype.isnative else f"byte-swapped {values.dtype.name}"
    # Strides that are not multiples of the element size come from views of structured arrays.
    if any(step % item for step in values.strides):
        values = np.ascontiguousarray(values)
    strides = tuple(step // item for step in values.strides)
    return Tensor(values.ctypes.data, values.shape, strides, dtype, None, values)


class _DLTensor(ctypes.Structure):
    """The struct DLTensor of DLPack's header."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_in.restype = ctypes.c_void_p
_pointer_in.argtypes = (ctypes.py_object, ctypes.c_char_p)


def from_dlpack(name: str, values: Any, stream: int) -> Tensor:  # noqa: ANN401 - any DLPack array
    """Return the tensor of a DLPack array. On a GPU, later work on the stream sees the elements of the array."""
    device, _ = values.__dlpack_device__()
    if device in _HOST:
        capsule = values.__dlpack__()
    elif device in _GPU:
        # In DLPack, stream 0 is ambiguous, and 1 is the legacy default stream.
        capsule = values.__dlpack__(stream=stream or 1)
    else:
        raise ContractError(name, "an array on a CPU or a CUDA GPU", f"DLPack device {device}", rule=Rule.TYPE)
    return of_capsule(name, capsule)


def of_capsule(name: str, capsule: Any) -> Tensor:  # noqa: ANN401 - a DLPack capsule
    described = _DLTensor.from_address(_pointer_in(capsule, b"dltensor"))
    if described.device_type not in (*_HOST, *_GPU):
        limit = "an array on a CPU or a CUDA GPU"
        raise ContractError(name, limit, f"DLPack device {described.device_type}", rule=Rule.TYPE)
    shape = tuple(described.shape[: described.ndim])
    if described.strides:
        strides = tuple(described.strides[: described.ndim])
    else:
        strides = tuple(prod(shape[axis + 1 :]) for axis in range(described.ndim))
    return Tensor(
        address=(described.data or 0) + described.byte_offset,
        shape=shape,
        strides=strides,
        dtype=_dtype(described),
        device=described.device_id if described.device_type in _GPU else None,
        # The capsule keeps the elements alive, because nothing consumes the capsule.
        owner=capsule,
    )


def _dtype(described: _DLTensor) -> str:
    kind = _CODES.get(described.code, f"code {described.code} of ")
    lanes = f"x{described.lanes}" if described.lanes != 1 else ""
    return f"{kind}{described.bits}{lanes}"
