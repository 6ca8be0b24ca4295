"""A step's arrays as the bytes of one record: written once by the engine's thread, and read where they lie."""

import struct
from typing import Any, NamedTuple

import numpy as np

from tokenbus_contracts import BatchKind, ContractError, Rule, SpeculativeMethod, StepPhase, ValueKind
from tokenbus_services.worker.assembler import Host, keys_of, on_host
from tokenbus_services.worker.step import ARRAYS, StepArrays

_DTYPES = tuple(map(np.dtype, ("u1", "i1", "?", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8")))
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES, 1)}
_MOST_DIMENSIONS = 3
_HEAD = struct.Struct("<QQIBBBBB3x")
_ARRAY = struct.Struct("<BB2xIII")
"""Of each array: its type (0: there is none), and its shape."""
_ALL_ARRAYS = struct.Struct("<" + _ARRAY.format[1:] * len(ARRAYS))
_DATA = (_HEAD.size + _ALL_ARRAYS.size + 7) // 8 * 8
_ABSENT = (0, 0, 0, 0, 0)


class Hosted(NamedTuple):
    """A step's arrays on the host, each of a type that can be handed over, and the bytes of their record."""

    arrays: list[Host | None]
    size: int


def hosted(arrays: StepArrays, most: int) -> Hosted:
    """Return a step's arrays on the host; a ContractError says which is none, or that they are too large."""
    found: list[Host | None] = []
    size = _DATA
    for name in ARRAYS:
        values = getattr(arrays, name)
        if values is not None:
            if type(values) is not np.ndarray or values.dtype not in _CODES:
                values = _converted(name, values)
            if values.ndim > _MOST_DIMENSIONS:
                raise ContractError(name, f"{_MOST_DIMENSIONS} dimensions", values.ndim, rule=Rule.MAX)
            size += (values.nbytes + 7) // 8 * 8
        found.append(values)
    if size > most:
        raise ContractError("step", f"{most} bytes of arrays", size, rule=Rule.MAX)
    return Hosted(found, size)


def _converted(name: str, values: object) -> Host:
    host = keys_of(values) if name == "request_keys" else on_host(name, values)
    if host.dtype not in _CODES:
        raise ContractError(name, "numbers", host.dtype.name, rule=Rule.TYPE)
    return host


def write(step: StepArrays, found: Hosted, room: memoryview) -> None:
    """Write a step into the memory of a record."""
    _HEAD.pack_into(
        room, 0, step.step, step.weight_version, step.parts,
        step.kind, step.phase, step.method, step.value_kind, step.draft_follows,
    )  # fmt: skip
    described: list[int] = []
    at = _DATA
    for values in found.arrays:
        if values is None:
            described += _ABSENT
            continue
        shape = values.shape
        described += (_CODES[values.dtype], len(shape), *shape, *_ABSENT[: _MOST_DIMENSIONS - len(shape)])
        if values.size:
            np.ndarray(shape, values.dtype, room, at)[...] = values
            at += (values.nbytes + 7) // 8 * 8
    _ALL_ARRAYS.pack_into(room, _HEAD.size, *described)


def read(data: memoryview) -> StepArrays:
    """Return the step of a record; its arrays are the record's own bytes, good until it is taken from the ring."""
    step, weight_version, parts, kind, phase, method, value_kind, draft_follows = _HEAD.unpack_from(data)
    found: dict[str, Any] = {}
    at = _DATA
    for name, (code, dimensions, *shape) in zip(
        ARRAYS, _ARRAY.iter_unpack(data[_HEAD.size : _HEAD.size + _ALL_ARRAYS.size]), strict=True
    ):
        if not code:
            found[name] = None
            continue
        values = np.ndarray(tuple(shape[:dimensions]), _DTYPES[code - 1], data, at if at < len(data) else 0)
        at += (values.nbytes + 7) // 8 * 8
        found[name] = values
    return StepArrays(
        **found,
        step=step,
        weight_version=weight_version,
        parts=parts,
        kind=BatchKind(kind),
        phase=StepPhase(phase),
        method=SpeculativeMethod(method),
        value_kind=ValueKind(value_kind),
        draft_follows=bool(draft_follows),
    )
