"""Whether a batch keeps the contract: every bound of the schema and every rule between columns.

Each check first asks one question of a whole column, and looks for the element to name only when the answer
is no. A valid batch of hundreds of rows is checked in some forty calls, whatever it holds.
"""

from typing import Any

import numpy as np

from tokenbus_contracts.batch import LogprobBatch
from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.generated.enums import BatchKind
from tokenbus_contracts.header import BatchHeader, misfit
from tokenbus_contracts.limits import Limits
from tokenbus_contracts.schema import HEADER_BOUNDS, MAJOR, WORKER_ID_BOUNDS
from tokenbus_contracts.validate.extras import check_extras
from tokenbus_contracts.validate.rows import check_rows
from tokenbus_contracts.validate.tokens import check_alternatives, check_tokens

__all__ = ["check_batch", "check_header"]

_INTEGERS = [(BatchHeader._fields.index(bound.name), bound) for bound in HEADER_BOUNDS]
_WORKER_ID_MIN_BYTES, _WORKER_ID_MAX_BYTES = WORKER_ID_BOUNDS.min_bytes, WORKER_ID_BOUNDS.max_bytes
_RANGES = [(index, bound.min, bound.max) for index, bound in _INTEGERS]


def check_batch(batch: LogprobBatch, limits: Limits) -> None:
    """Raise the ContractError of the first rule that the batch breaks; return if it breaks none."""
    check_header(batch.header)
    with np.errstate(invalid="ignore"):  # some versions of numpy warn of a NaN that they compare
        shape = check_rows(batch, limits)
        check_tokens(batch, limits, shape)
        if shape.alternatives:
            check_alternatives(batch, limits, shape)
        if batch.has_extras:
            check_extras(batch, limits)


def check_header(header: BatchHeader) -> None:
    """Refuse another major version, values out of bounds or of another type, and a part that its step does not have."""
    try:
        _check(header)
    except (TypeError, AttributeError, ValueError) as error:
        if isinstance(error, ContractError):
            raise
        raise misfit(header) from None


def _check(header: BatchHeader) -> None:
    if header.schema_major != MAJOR:
        limit = f"schema version {MAJOR} of package tokenbus.v{MAJOR}"
        raise ContractError("header.schema_major", limit, header.schema_major, rule=Rule.VERSION)
    values: tuple[Any, ...] = header
    for index, low, high in _RANGES:
        if not low <= values[index] <= high:
            _refuse_range(values)
    length = len(header.worker_id.encode())
    if length > _WORKER_ID_MAX_BYTES:
        raise ContractError("header.worker_id", _WORKER_ID_MAX_BYTES, length, rule=Rule.BYTES)
    if length < _WORKER_ID_MIN_BYTES:
        raise ContractError("header.worker_id", "a name", "an empty string", rule=Rule.REQUIRED)
    if not type(header.selection) is type(header.draft_follows) is bool:
        raise TypeError(header.selection, header.draft_follows)
    if header.draft_follows and header.kind != BatchKind.TARGET:
        raise ContractError("header.draft_follows", "False in a draft batch", header.draft_follows, rule=Rule.KIND)
    if header.part_index >= header.part_count:
        raise ContractError("header.part_index", header.part_count - 1, header.part_index, rule=Rule.MAX)


def _refuse_range(values: tuple[Any, ...]) -> None:
    for index, bound in _INTEGERS:
        value = values[index]
        field = f"header.{bound.name}"
        if value < bound.min and (bound.min or not bound.named):
            raise ContractError(field, bound.min, int(value), rule=Rule.MIN)
        if bound.named and not bound.min <= value <= bound.max:
            raise ContractError(field, "a value that the schema names", int(value), rule=Rule.NAMED)
        if value > bound.max:
            raise ContractError(field, bound.max, int(value), rule=Rule.MAX)
