"""Tensors that an op is given, as numpy arrays that are what the op needs, or one clear error."""

import numpy as np

from tokenbus_contracts import ContractError, Rule
from tokenbus_services.worker.arrays import Host, on_host
from tokenbus_services.worker.fastdeploy.message import Flags, Integers, Tensor


def integers(name: str, tensor: Tensor) -> Host:
    """Return whole numbers in the tensor's own shape."""
    array = on_host(name, tensor)
    if array.dtype.kind not in "iub":
        raise ContractError(name, "whole numbers", array.dtype.name, rule=Rule.TYPE)
    return array.astype(np.int64, copy=False)


def line(name: str, tensor: Tensor, least: int, each: str = "slot") -> Integers:
    """Return whole numbers in one line, of which there are at least so many: what is behind them is not meant.

    They are a copy: the engine goes on with its own, and a draft may yet be compared with these.
    """
    array = integers(name, tensor).reshape(-1)
    if array.size < least:
        raise ContractError(name, f"{least} elements, one for each {each}", array.size, rule=Rule.LENGTH)
    return np.array(array[:least], np.int64)


def slots(name: str, tensor: Tensor, most: int) -> int:
    """Return of how many slots a tensor tells."""
    shape = on_host(name, tensor).shape
    count = shape[0] if shape else 0
    if count > most:
        raise ContractError(name, most, count, rule=Rule.ITEMS)
    return count


def lines_of_slots(name: str, tensor: Tensor, most: int, *, least: int = 1) -> Host:
    """Return whole numbers with a line for each slot, of at least so many places."""
    array = integers(name, tensor)
    if array.ndim != 2 or array.shape[1] < least:  # noqa: PLR2004 - slots and places
        limit = f"2 dimensions, slots and at least {least} tokens"
        raise ContractError(name, limit, f"shape {array.shape}", rule=Rule.TYPE)
    slots(name, array, most)
    return array


def one_of_each_slot(name: str, tensor: Tensor, most: int) -> Integers:
    """Return whole numbers of which each slot has one."""
    array = integers(name, tensor)
    count = slots(name, array, most)
    if array.size != count:
        raise ContractError(name, f"{count} elements, one for each slot", array.size, rule=Rule.LENGTH)
    return array.reshape(-1)


def table(name: str, tensor: Tensor, columns: int) -> Host:
    """Return numbers with a line for each token, at most so many in a line."""
    array = on_host(name, tensor)
    if array.ndim != 2 or not array.shape[1]:  # noqa: PLR2004 - tokens and columns
        raise ContractError(name, "2 dimensions, tokens and columns", f"shape {array.shape}", rule=Rule.TYPE)
    if array.shape[1] > columns:
        raise ContractError(f"{name}.columns", columns, array.shape[1], rule=Rule.MAX)
    return array


def truth(name: str, tensor: Tensor) -> bool:
    """Return the one flag that a tensor holds."""
    array = on_host(name, tensor).reshape(-1)
    if array.size != 1:
        raise ContractError(name, "one flag", f"{array.size} elements", rule=Rule.LENGTH)
    return bool(array[0])


def flags(name: str, tensor: Tensor, least: int) -> Flags:
    """Return which slots a flag is set for."""
    found: Flags = line(name, tensor, least) == 1
    return found


def clear(tensor: Tensor) -> None:
    """Set all of a tensor's elements to zero where it lies."""
    tensor[:] = 0
