"""Converts a caller's values to columns, and refuses values that the conversion would change."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.schema import Column


def fitted(column: Column, values: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return values as an array of the column's type. A ContractError names the value that does not fit."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ContractError(column.name, "one value for each element", str(error), rule=Rule.TYPE) from None
    if isinstance(values, np.ma.MaskedArray):
        raise ContractError(column.name, "a value for every element", "a masked array", rule=Rule.TYPE)
    if array.ndim != 1:
        raise ContractError(column.name, "one dimension", f"shape {array.shape}", rule=Rule.TYPE)
    if not array.size:
        return column.empty
    wanted = "fiu" if column.dtype.kind == "f" else "iu"
    if array.dtype.kind in "fO" and column.dtype.kind != "f":
        array = _whole_numbers(column, values, array)
    if array.dtype.kind not in wanted:
        raise ContractError(column.name, f"values of {column.dtype.name}", kind_of(array), rule=Rule.TYPE)
    if column.dtype.kind != "f":
        _refuse_wrapping(column, array)
    # In float32, a large float64 becomes infinite, and a signalling NaN becomes a quiet NaN: later checks refuse both.
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(column.dtype)


def _whole_numbers(column: Column, values: npt.ArrayLike, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert a list of integers to uint64 if numpy infers no integer type because some integers exceed 2**63 - 1."""
    if not isinstance(values, (list, tuple)):
        return array
    if not all(isinstance(value, (int, np.integer)) and not isinstance(value, bool) for value in values):
        return array
    for element, value in enumerate(values):
        if int(value) < 0:
            raise ContractError(f"{column.name}[{element}]", column.min, value, rule=Rule.MIN)
        if int(value) > column.max:
            raise ContractError(f"{column.name}[{element}]", column.max, value, rule=Rule.MAX)
    return np.array(values, np.uint64)


def kind_of(array: npt.NDArray[Any]) -> str:
    return f"{array.dtype.name} of shape {array.shape}"


def _refuse_wrapping(column: Column, array: npt.NDArray[Any]) -> None:
    """Raise a ContractError for integers that do not fit the column's type."""
    lowest, highest = int(array.min()), int(array.max())
    highest_held = (1 << 8 * column.item_bytes) - 1
    if lowest < 0:
        raise ContractError(f"{column.name}[{int(array.argmin())}]", column.min, lowest, rule=Rule.MIN)
    if highest > highest_held:
        raise ContractError(f"{column.name}[{int(array.argmax())}]", column.max, highest, rule=Rule.MAX)
