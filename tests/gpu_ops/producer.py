"""Arrays that speak DLPack as frameworks' do: of bfloat16, which numpy has not, and on whatever device they claim."""

import ctypes
from typing import Any

import numpy.typing as npt

from tests.gpu_ops.logits import Floats, bits_of_bfloat16
from tokenbus_gpu_ops.tensor import _DLTensor

_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Produced:
    """The elements of an array of numpy's, offered through DLPack under a type code and a device."""

    def __init__(self, values: npt.NDArray[Any], code: int, device: tuple[int, int] = (1, 0)) -> None:
        self.values = values
        self.streams: list[int | None] = []
        self._device = device
        self._shape = (ctypes.c_int64 * values.ndim)(*values.shape)
        self._strides = (ctypes.c_int64 * values.ndim)(*(step // values.itemsize for step in values.strides))
        tensor = _DLTensor(
            values.ctypes.data, *device, values.ndim, code, values.itemsize * 8, 1, self._shape, self._strides, 0
        )
        self._managed = _Managed(tensor, None, _Deleter())

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, stream: int | None = None) -> object:
        self.streams.append(stream)
        return _new_capsule(ctypes.addressof(self._managed), b"dltensor", None)

    def get(self) -> npt.NDArray[Any]:
        """Return the elements in the computer's own memory, as cupy's arrays do."""
        return self.values


def given_as(dtype: str, logits: Floats) -> object:
    return Produced(bits_of_bfloat16(logits), code=4) if dtype == "bfloat16" else logits.astype(dtype)


def as_if_on_gpu(values: npt.NDArray[Any]) -> Produced:
    """Return an array that says it is on a GPU: what asks the GPU for it finds out that there is none."""
    codes = {"f": 2, "i": 0, "u": 1}
    return Produced(values, codes[values.dtype.kind], device=(2, 0))
