"""Records of a step's arrays, which the engine's thread copies once and the publisher reads in place."""

import struct
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from tokenbus.worker.ragged import Host, on_host, request_ids_of
from tokenbus.worker.step import ARRAYS, StepArrays
from tokenbus_contracts import BatchKind, ContractError, Rule, SpeculativeMethod, StepPhase, ValueKind

_DTYPES = tuple(map(np.dtype, ("u1", "i1", "?", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8")))
_FORMATS = ("B", "b", "?", "H", "h", "I", "i", "LQ", "lq", "e", "f", "d")
_CODES = {format_: code for code, formats in enumerate(_FORMATS) for format_ in formats}
"""Type code of each buffer format. Some types have two formats."""
_WIDEST_BYTES = 8
_MAX_DIMENSIONS = 3
_HEAD = struct.Struct("<QQIBBBBBB2x")
_ARRAY = struct.Struct("<BBB5xQQQ")
"""Head of an array: its index in ARRAYS, type code, number of dimensions, and shape."""
_SHAPES = ((1, 1, 1), (1, 1), (1,), ())
_given = attrgetter(*ARRAYS)
_ENUMERATIONS = [
    (name, kinds.__name__, frozenset(map(int, kinds)))
    for name, kinds in (
        ("kind", BatchKind),
        ("phase", StepPhase),
        ("method", SpeculativeMethod),
        ("value_kind", ValueKind),
    )
]


class Hosted(NamedTuple):
    """A step's arrays on the host, converted to types that a record can hold, and the record's size."""

    arrays: list[tuple[int, Host, memoryview]]
    """The arrays that are not None, with their indices in ARRAYS and their buffers."""
    size: int

    def get(self, name: str) -> Host | None:
        wanted = ARRAYS.index(name)
        return next((values for index, values, _ in self.arrays if index == wanted), None)


def hosted(arrays: StepArrays, most: int) -> Hosted:
    """Return a step's arrays on the host, or raise ContractError for invalid or too large arrays."""
    found = []
    size = _HEAD.size
    for name, kinds, known in _ENUMERATIONS:
        if getattr(arrays, name) not in known:
            raise ContractError(name, f"one of {kinds}", getattr(arrays, name), rule=Rule.TYPE)
    if arrays.request_ids is None:
        raise ContractError("request_ids", "an array", "none", rule=Rule.TYPE)
    for index, given in enumerate(_given(arrays)):
        if given is None:
            continue
        if type(given) is np.ndarray and (buffer := memoryview(given)).format in _CODES:  # type: ignore[arg-type]
            values = given
        else:
            values = _converted(ARRAYS[index], given)
            buffer = memoryview(values)  # type: ignore[arg-type]  # as numpy's types have it, an array is not a buffer
        if buffer.ndim > _MAX_DIMENSIONS:
            raise ContractError(ARRAYS[index], f"{_MAX_DIMENSIONS} dimensions", buffer.ndim, rule=Rule.MAX)
        size += _ARRAY.size + (buffer.nbytes + 7) // 8 * 8
        found.append((index, values, buffer))
    if size > most:
        raise ContractError("step", f"{most} bytes of arrays", size, rule=Rule.MAX)
    return Hosted(found, size)


def _converted(name: str, values: object) -> Host:
    host = request_ids_of(values) if name == "request_ids" else on_host(name, values)
    if host.dtype.kind not in "biuf" or host.dtype.itemsize > _WIDEST_BYTES:
        raise ContractError(name, "numbers", host.dtype.name, rule=Rule.TYPE)
    return host if host.dtype.isnative else host.astype(host.dtype.newbyteorder("="))


def write(step: StepArrays, number: int, found: Hosted, room: memoryview) -> None:
    """Write a step with its number into the memory of a record."""
    _HEAD.pack_into(
        room, 0, number, step.weight_version, step.parts,
        step.kind, step.phase, step.method, step.value_kind, step.draft_follows, len(found.arrays),
    )  # fmt: skip
    at = _HEAD.size
    for index, values, buffer in found.arrays:
        shape = values.shape
        _ARRAY.pack_into(room, at, index, _CODES[buffer.format], len(shape), *shape, *_SHAPES[len(shape)])
        at += _ARRAY.size
        if size := buffer.nbytes:
            if buffer.c_contiguous:
                room[at : at + size] = buffer.cast("B")
            else:
                np.ndarray(shape, values.dtype, room, at)[...] = values
            at += (size + 7) // 8 * 8


def read(data: memoryview) -> StepArrays:
    """Return the step of a record. The arrays are views of the record, valid until the record is taken."""
    step, weight_version, parts, kind, phase, method, value_kind, draft_follows, count = _HEAD.unpack_from(data)
    found: dict[str, Any] = dict.fromkeys(("request_ids", "positions", "token_counts", "token_ids"))
    at = _HEAD.size
    for _ in range(count):
        index, code, dimensions, *shape = _ARRAY.unpack_from(data, at)
        at += _ARRAY.size
        dtype, shape = _DTYPES[code], shape[:dimensions]
        size = prod(shape) * dtype.itemsize
        found[ARRAYS[index]] = np.ndarray(shape, dtype, data[at : at + size] if size else None)
        at += (size + 7) // 8 * 8
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
