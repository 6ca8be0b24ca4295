"""Tensors that an op is given: read and filled where they lie, or refused in one clear line."""

import ctypes
import math

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import ContractError, Rule
from tokenbus_engines.fastdeploy.message import Tensor
from tokenbus_services.worker.arrays import Host, on_host

_DTYPES = {f"paddle.{name}": np.dtype(name) for name in ("int64", "int32", "float32", "float64", "bool")}


def host(name: str, tensor: Tensor) -> Host:
    """Return a tensor as numpy's array: where it lies in the computer's own memory, not a copy."""
    found = _in_place(tensor)
    return on_host(name, tensor) if found is None else found


class Arguments(dict[str, Tensor]):
    """A save op's arguments by name, without those that its form does not have."""

    def integers(self, name: str) -> Host:
        """Return whole numbers in the tensor's own shape and type."""
        array = host(name, self[name])
        if array.dtype.kind not in "iub":
            raise ContractError(name, "whole numbers", array.dtype.name, rule=Rule.TYPE)
        return array

    def floats(self, name: str) -> Host:
        """Return floats in the tensor's own shape and type."""
        array = host(name, self[name])
        if array.dtype.kind != "f":
            raise ContractError(name, "floats", array.dtype.name, rule=Rule.TYPE)
        return array

    def line(self, name: str, least: int, each: str = "slot") -> Host:
        """Return the first whole numbers of a tensor in one line, of which there are at least so many."""
        array = self.integers(name).reshape(-1)
        if array.size < least:
            raise ContractError(name, f"{least} elements, one for each {each}", array.size, rule=Rule.LENGTH)
        return array[:least]

    def slots(self, name: str, most: int) -> int:
        """Return how many slots a tensor is about."""
        tensor = self[name]
        shape = tensor.shape if hasattr(tensor, "shape") else host(name, tensor).shape
        count = int(shape[0]) if len(shape) else 0
        if count > most:
            raise ContractError(name, most, count, rule=Rule.ITEMS)
        return count

    def table(self, name: str, lines: str, least: int = 0) -> Host:
        """Return whole numbers in lines: a slot's tokens, or a token's columns, at least so many."""
        array = self.integers(name)
        if array.ndim != 2 or array.shape[1] < least:  # noqa: PLR2004 - lines, and what they hold
            raise ContractError(name, f"2 dimensions, {lines}", f"shape {array.shape}", rule=Rule.TYPE)
        return array

    def truth(self, name: str) -> bool:
        """Return the flag that a tensor begins with."""
        array = host(name, self[name]).reshape(-1)
        if not array.size:
            raise ContractError(name, "one flag", "none", rule=Rule.LENGTH)
        return bool(array[0])


def lines(name: str, array: Host, columns: int, needed: int) -> Host:
    """Return an array in lines of so many elements, of which there are at least so many: as an op reads it."""
    flat = array.reshape(-1)
    count = flat.size // columns
    if count < needed:
        limit = f"{needed} lines of {columns}, one for each token"
        raise ContractError(name, limit, count, rule=Rule.LENGTH)
    return flat[: count * columns].reshape(count, columns)


def clear(tensor: Tensor) -> None:
    """Set all of a tensor's elements to zero where it lies."""
    array = _in_place(tensor)
    if array is not None:
        array[...] = 0
        return
    found = on_host("preempted_idx", tensor)
    if found.any():  # copied, not computed: an old framework on a new card computes anything
        tensor.set_value(np.zeros(found.shape, found.dtype))


class Output:
    """A tensor of the caller's: `flat` is written to, and what it holds is the tensor's once it is stored."""

    def __init__(self, name: str, tensor: Tensor, size: int, dtype: npt.DTypeLike) -> None:
        """Take a tensor, which must be of that type and at least that large."""
        found = _in_place(tensor)
        self._copied_to: Tensor = tensor if found is None else None
        self._shaped = np.array(on_host(name, tensor), order="C") if found is None else found
        if self._shaped.dtype != np.dtype(dtype):
            raise ContractError(name, np.dtype(dtype).name, self._shaped.dtype.name, rule=Rule.TYPE)
        if self._shaped.size < size:
            raise ContractError(name, f"at least {size} elements", self._shaped.size, rule=Rule.LENGTH)
        if not (self._shaped.flags.c_contiguous and self._shaped.flags.writeable):
            raise ContractError(name, "an array that is contiguous and may be written to", "another", rule=Rule.TYPE)
        self.flat: Host = self._shaped.reshape(-1)

    def store(self) -> None:
        """Let the tensor have what was written."""
        if self._copied_to is not None:
            self._copied_to.set_value(self._shaped)


def _in_place(tensor: Tensor) -> Host | None:
    """Return an array, or a tensor of paddle's that lies in the computer's own memory as an array there, else None."""
    if type(tensor) is np.ndarray:
        return tensor
    place = getattr(tensor, "place", None)
    if place is None or not hasattr(tensor, "data_ptr") or not place.is_cpu_place():
        return None
    dtype = _DTYPES.get(str(tensor.dtype))
    shape = tuple(tensor.shape)
    if dtype is None or 0 in shape or not tensor.is_contiguous():
        return None
    memory = (ctypes.c_byte * (math.prod(shape) * dtype.itemsize)).from_address(tensor.data_ptr())
    found: Host = np.frombuffer(memoryview(memory), dtype).reshape(shape)
    return found
