"""Reads and fills the tensors that an op gets, or refuses a tensor with a clear error."""

import ctypes
import math
import operator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenbus.engines.fastdeploy.message import Tensor
from tokenbus.worker.ragged import Host, on_host
from tokenbus_contracts import ContractError, Rule

_DTYPES = {f"paddle.{name}": np.dtype(name) for name in ("int64", "int32", "float32", "float64", "bool")}
_KINDS = {"i": "iu", "f": "f", "b": "biuf"}
"""For each kind of FastDeploy's dtypes, the kinds of numpy dtypes that can be converted to it."""


def host(name: str, tensor: Tensor) -> Host:
    """Return a tensor as a numpy array, which is a copy unless the tensor is in host memory."""
    if isinstance(tensor, np.ndarray):
        return np.asarray(tensor)
    found = _in_place(tensor)
    if found is not None:
        return found
    if "bfloat16" in str(getattr(tensor, "dtype", "")):  # numpy has no bfloat16, so paddle returns integers
        raise ContractError(name, "a type that numpy has", "bfloat16", rule=Rule.TYPE)
    return np.array(on_host(name, tensor), order="C")


def check_writable(name: str, tensor: Tensor) -> None:
    """Raise a ContractError if a write to the tensor is impossible or would change other elements."""
    if isinstance(tensor, np.ndarray):
        got = "" if tensor.flags.writeable else "one that is read-only"
    elif not hasattr(tensor, "set_value"):
        got = type(tensor).__name__
    else:  # `set_value` on a paddle view writes to the whole tensor
        is_contiguous = getattr(tensor, "is_contiguous", None)
        got = "a view that is not contiguous" if is_contiguous and not is_contiguous() else ""
    if got:
        raise ContractError(name, "a tensor of paddle or an array of numpy to write to", got, rule=Rule.TYPE)


def whole_number(name: str, value: object) -> int:
    """Return an argument as a signed 64-bit integer, or raise a ContractError."""
    try:
        found = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ContractError(name, "a whole number", type(value).__name__, rule=Rule.TYPE) from None
    if not -(2**63) <= found < 2**63:
        raise ContractError(name, "a whole number of 64 bits", found, rule=Rule.TYPE)
    return found


def store(tensor: Tensor, array: Host) -> None:
    """Copy an array from `host` back into its tensor, unless the array is a view of the tensor."""
    if not isinstance(tensor, np.ndarray) and _in_place(tensor) is None:
        tensor.set_value(array)


def converted(name: str, array: Host, dtype: np.dtype[Any]) -> Host:
    """Convert an array to `dtype`, or raise ContractError for another kind of dtype or an integer that does not fit."""
    if array.dtype.kind not in _KINDS[dtype.kind]:
        raise ContractError(name, dtype.name, array.dtype.name, rule=Rule.TYPE)
    with np.errstate(over="ignore"):
        found: Host = array.astype(dtype, copy=False)
    if dtype.kind == "i" and not np.array_equal(found, array):
        limit = f"a number of {dtype.name}"
        raise ContractError(name, limit, array[np.not_equal(found, array)].flat[0], rule=Rule.TYPE)
    return found


def clear(tensor: Tensor) -> None:
    """Set all elements of a tensor to zero, in place."""
    array = tensor if isinstance(tensor, np.ndarray) else _in_place(tensor)
    if array is not None:
        array[...] = 0
        return
    found = on_host("preempted_idx", tensor)
    if found.any():  # copy zeros, because an old framework on a new GPU may compute wrong values
        tensor.set_value(np.zeros(found.shape, found.dtype))


def _in_place(tensor: Tensor) -> Host | None:
    """Return a view of a contiguous paddle tensor in host memory, or None."""
    place = getattr(tensor, "place", None)
    if place is None or not hasattr(tensor, "data_ptr") or not place.is_cpu_place() or not tensor.is_contiguous():
        return None
    return _view(tensor.data_ptr(), tuple(tensor.shape), str(tensor.dtype))


@lru_cache(256)
def _view(address: int, shape: tuple[int, ...], name: str) -> npt.NDArray[Any] | None:
    """Return a view of the memory at an address, cached because an engine passes the same tensors at each step."""
    dtype = _DTYPES.get(name)
    if dtype is None or 0 in shape:
        return None
    memory = (ctypes.c_byte * (math.prod(shape) * dtype.itemsize)).from_address(address)
    found: Host = np.frombuffer(memoryview(memory), dtype).reshape(shape)
    return found
