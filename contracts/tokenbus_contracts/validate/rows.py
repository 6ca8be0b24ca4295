"""Checks of the columns that have one element for each row."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.batch import LogprobBatch
from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.frame_checks import refuse_twice
from tokenbus_contracts.generated.bounds_pb2 import ColumnLength, TokenRule
from tokenbus_contracts.generated.enums import BatchKind, RowStatus, Scoring, ValueKind
from tokenbus_contracts.limits import Limits
from tokenbus_contracts.schema import COLUMN, COLUMNS, STATUS_RULES, Column

_ROW_COLUMNS = [column.name for column in COLUMNS if column.length == ColumnLength.COLUMN_LENGTH_ROWS]
# Sets of byte values for bytes.translate to delete. If nothing remains, all values of a column are in the set.
# For a few hundred bytes, bytes.translate is several times faster than any array operation.
_UP_TO = [bytes(range(most + 1)) for most in range(256)]
_STATUSES = bytes(STATUS_RULES)
_SCORINGS = bytes(scoring for scoring in Scoring if scoring)

_ANY = np.arange(256)
_MAY_PROPOSE = np.isin(_ANY, [s for s, rule in STATUS_RULES.items() if rule.proposals])
_NEEDS_TOKENS = np.isin(_ANY, [s for s, rule in STATUS_RULES.items() if rule.tokens == TokenRule.TOKEN_RULE_SOME])
_FORBIDS_TOKENS = np.isin(_ANY, [s for s, rule in STATUS_RULES.items() if rule.tokens == TokenRule.TOKEN_RULE_NONE])


class Shape(NamedTuple):
    """The required lengths of the ragged columns, computed from a batch's counts."""

    tokens: int
    scored_tokens: int
    alternatives: int
    proposals: int
    top_ks: npt.NDArray[np.intp]
    """The number of alternatives of each scored token."""


def check_rows(batch: LogprobBatch, limits: Limits) -> Shape:
    """Check every column with one element per row, and return the required lengths of the ragged columns."""
    rows = batch.request_ids.size
    if rows > limits.max_rows:
        raise ContractError("request_ids", limits.max_rows, rows, rule=Rule.ITEMS)
    for name in _ROW_COLUMNS:
        check_length(name, getattr(batch, name), rows, "one for each row")
    _check_step_rows(batch, rows)
    _check_values(batch, limits)
    if rows:
        _check_once("request_ids", batch.request_ids, 1, COLUMN["request_ids"].max)
        _check_once("batch_indices", batch.batch_indices, 0, batch.header.step_rows - 1)
        check_range("positions", batch.positions, COLUMN["positions"].max)
    _check_statuses(batch, rows)
    if batch.stops.size:
        stopped = batch.statuses.tobytes().count(RowStatus.FINISHED_STOP)
        check_length("stops", batch.stops, stopped, "one for each row that is FINISHED_STOP, or none")
        check_range("stops", batch.stops, COLUMN["stops"].max)
    _check_scorings(batch, rows)
    counts = batch.token_counts
    scored_counts = counts * (batch.scorings != Scoring.NONE)
    top_ks = np.repeat(batch.top_ks, scored_counts).astype(np.intp)
    tokens, scored_tokens, alternatives, proposals = (
        int(np.add.reduce(each, dtype=np.intp)) for each in (counts, scored_counts, top_ks, batch.proposal_counts)
    )
    return Shape(tokens, scored_tokens, alternatives, proposals, top_ks)


def _check_step_rows(batch: LogprobBatch, rows: int) -> None:
    header = batch.header
    if header.part_count == 1 and not header.selection:
        if header.step_rows != rows:
            limit = f"{rows}, the rows of the only part"
            raise ContractError("header.step_rows", limit, header.step_rows, rule=Rule.LENGTH)
    elif header.step_rows < rows:
        raise ContractError("header.step_rows", rows, header.step_rows, rule=Rule.MIN)


def _check_values(batch: LogprobBatch, limits: Limits) -> None:
    for name, named in (("statuses", _STATUSES), ("scorings", _SCORINGS)):
        values = getattr(batch, name)
        if values.tobytes().translate(None, named):
            element = int((~np.isin(values, np.frombuffer(named, np.uint8))).argmax())
            raise unnamed(COLUMN[name], element, int(values[element]))
    for name, most in (
        ("token_counts", limits.max_tokens_per_row),
        ("draft_token_counts", limits.max_draft_tokens_per_row),
        ("proposal_counts", limits.max_draft_tokens_per_row),
        # A token cannot have more alternatives than the vocabulary has tokens.
        ("top_ks", min(limits.max_top_k, batch.header.vocabulary_size or limits.max_top_k)),
    ):
        values = getattr(batch, name)
        if values.tobytes().translate(None, _UP_TO[most]):
            _refuse_above(name, values, most)


def _check_once(name: str, values: npt.NDArray[np.unsignedinteger], least: int, most: int) -> None:
    in_order = np.sort(values)
    if in_order[0] < least:
        raise ContractError(f"{name}[{int(values.argmin())}]", least, int(in_order[0]), rule=Rule.MIN)
    if in_order[-1] > most:
        _refuse_above(name, values, most)
    if np.count_nonzero(in_order[1:] == in_order[:-1]):
        refuse_twice(values.tolist(), name)


def _check_statuses(batch: LogprobBatch, rows: int) -> None:
    """Check that the statuses of the rows and the kind of the batch permit the counts."""
    counts = batch.token_counts
    if batch.statuses.tobytes().count(RowStatus.ACTIVE) != rows or 0 in counts.tobytes():
        carries = counts != 0
        _refuse_status(batch, "token_counts", _NEEDS_TOKENS[batch.statuses] & ~carries, "at least 1 token")
        _refuse_status(batch, "token_counts", _FORBIDS_TOKENS[batch.statuses] & carries, "no token")
    if batch.proposal_counts.tobytes().strip(b"\0"):
        surplus = ~_MAY_PROPOSE[batch.statuses] & (batch.proposal_counts != 0)
        _refuse_status(batch, "proposal_counts", surplus, "no proposal")
    if batch.header.kind == BatchKind.DRAFT:
        for name in ("draft_token_counts", "proposal_counts"):
            column = getattr(batch, name)
            if column.tobytes().strip(b"\0"):
                row = int((column != 0).argmax())
                raise ContractError(f"{name}[{row}]", "0 in a draft batch", int(column[row]), rule=Rule.KIND)


def _check_scorings(batch: LogprobBatch, rows: int) -> None:
    scorings = batch.scorings.tobytes()
    if scorings.count(Scoring.NONE) != rows and batch.header.value_kind == ValueKind.UNSPECIFIED:
        limit = "a kind, because rows are scored"
        raise ContractError("header.value_kind", limit, int(batch.header.value_kind), rule=Rule.SCORING)
    if scorings.count(Scoring.FULL) != rows:
        check_zero(batch, "top_ks", batch.scorings != Scoring.FULL)


def check_zero(batch: LogprobBatch, name: str, forbids: npt.NDArray[np.bool_]) -> None:
    """Raise a ContractError for a nonzero value in a row whose scoring forbids it."""
    surplus = forbids & (getattr(batch, name) != 0)
    if surplus.any():
        row = int(surplus.argmax())
        limit = f"0 where the row's scoring is {Scoring(batch.scorings[row]).name}"
        raise ContractError(f"{name}[{row}]", limit, int(getattr(batch, name)[row]), rule=Rule.SCORING)


def check_length(name: str, column: npt.NDArray[np.generic], wanted: int, reason: str) -> None:
    if column.size != wanted:
        raise ContractError(name, f"{wanted} elements, {reason}", column.size, rule=Rule.LENGTH)


def check_range(name: str, values: npt.NDArray[np.unsignedinteger], most: int, least: int = 0) -> None:
    if not values.size:
        return
    if least and np.minimum.reduce(values) < least:
        element = int(values.argmin())
        raise ContractError(f"{name}[{element}]", least, int(values[element]), rule=Rule.MIN)
    if np.maximum.reduce(values) > most:
        _refuse_above(name, values, most)


def _refuse_above(name: str, values: npt.NDArray[np.unsignedinteger], most: int) -> None:
    element = int((values > most).argmax())
    raise ContractError(f"{name}[{element}]", most, int(values[element]), rule=Rule.MAX)


def unnamed(column: Column, element: int, value: int) -> ContractError:
    """Return the error for an enum value that is below the column's bound or has no name in the schema."""
    field = f"{column.name}[{element}]"
    if value < column.min:
        return ContractError(field, column.min, value, rule=Rule.MIN)
    return ContractError(field, "a value that the schema names", value, rule=Rule.NAMED)


def _refuse_status(batch: LogprobBatch, name: str, wrong: npt.NDArray[np.bool_], limit: str) -> None:
    """Raise a ContractError for the first row that is marked in `wrong`."""
    if wrong.any():
        row = int(wrong.argmax())
        status = RowStatus(batch.statuses[row]).name
        value = int(getattr(batch, name)[row])
        raise ContractError(f"{name}[{row}]", f"{limit} in a row that is {status}", value, rule=Rule.STATUS)
