"""Checks of a batch: every bound of the schema, and every rule between columns.

Each check tests a whole column at once. If the test fails, the check looks for the wrong element. Checking a valid
batch of hundreds of rows takes about forty numpy calls.
"""

from typing import Any

import numpy as np

from tokenbus_contracts.batch import LogprobBatch
from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.frame_checks import beyond
from tokenbus_contracts.generated.enums import BatchKind
from tokenbus_contracts.header import BatchHeader, misfit
from tokenbus_contracts.limits import Limits
from tokenbus_contracts.schema import HEADER_RULES, FieldRule
from tokenbus_contracts.validate.extras import check_extras
from tokenbus_contracts.validate.rows import check_rows
from tokenbus_contracts.validate.tokens import check_alternatives, check_tokens

__all__ = ["check_batch", "check_header"]

_MIN_BYTES, _MAX_BYTES = (getattr(HEADER_RULES["worker_id"].bounds, name) for name in ("min_bytes", "max_bytes"))
_RANGES: list[tuple[int, Any, Any, FieldRule]] = [
    (BatchHeader._fields.index(name), rule.min, rule.max, rule)
    for name, rule in HEADER_RULES.items()
    if not rule.is_text
]


def check_batch(batch: LogprobBatch, limits: Limits) -> None:
    """Raise the ContractError of the first rule that the batch breaks."""
    check_header(batch.header)
    with np.errstate(invalid="ignore"):  # numpy may warn about comparisons with NaN
        shape = check_rows(batch, limits)
        check_tokens(batch, limits, shape)
        if shape.alternatives:
            check_alternatives(batch, limits, shape)
        if batch.has_extras:
            check_extras(batch, limits)


def check_header(header: BatchHeader) -> None:
    """Raise a ContractError for another major version, an invalid value, or a part_index at or above part_count."""
    try:
        _check(header)
    except (TypeError, AttributeError, ValueError) as error:
        if isinstance(error, ContractError):
            raise
        raise misfit(header) from None


def _check(header: BatchHeader) -> None:
    values: tuple[Any, ...] = header
    for place, low, high, rule in _RANGES:
        if not low <= values[place] <= high:
            raise beyond(f"header.{rule.name}", int(values[place]), rule)
    length = len(header.worker_id.encode())
    if length > _MAX_BYTES:
        raise ContractError("header.worker_id", _MAX_BYTES, length, rule=Rule.BYTES)
    if length < _MIN_BYTES:
        raise ContractError("header.worker_id", "a name", "an empty string", rule=Rule.REQUIRED)
    if not type(header.selection) is type(header.draft_follows) is bool:
        raise TypeError(header.selection, header.draft_follows)
    if header.draft_follows and header.kind != BatchKind.TARGET:
        raise ContractError("header.draft_follows", "False in a draft batch", header.draft_follows, rule=Rule.KIND)
    if header.part_index >= header.part_count:
        raise ContractError("header.part_index", header.part_count - 1, header.part_index, rule=Rule.MAX)
