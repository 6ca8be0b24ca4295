"""What is left of a batch that breaks the contract: the rows that keep it, and what is wrong with each other one."""

from typing import NamedTuple

import numpy as np

from tokenbus_contracts import ContractError, Limits, LogprobBatch, RowStatus, Scoring, encode

_EMPTY_ROWS = {
    "statuses": RowStatus.IDLE,
    "token_counts": 0,
    "draft_token_counts": 0,
    "proposal_counts": 0,
    "scorings": Scoring.NONE,
    "top_ks": 0,
}
"""What takes the place of a row that is wrong, so that every other row keeps its own."""


class Isolated(NamedTuple):
    """A batch without what is wrong in it."""

    batch: LogprobBatch
    faults: dict[int, ContractError]
    """By request key."""


def isolated(batch: LogprobBatch, limits: Limits, error: ContractError) -> Isolated:
    """Part the rows that break the contract from those that keep it, or raise the error: it is not one row's alone."""
    if not batch.has_consistent_lengths():
        raise error
    faults: dict[int, ContractError] = {}
    wrong = np.zeros(batch.row_count, np.bool_)
    for row, key in enumerate(batch.request_keys.tolist()):
        found = _fault(batch, row, limits)
        if found is not None:
            wrong[row] = True
            faults[key] = found
    if not faults or 0 in faults:
        raise error
    rest = _with_empty(batch, wrong)
    try:
        encode(rest, limits)
    except ContractError:
        raise error from None
    return Isolated(rest, faults)


def emptied(batch: LogprobBatch) -> LogprobBatch:
    """Return a batch with nothing in its rows: a step whose other parts are good is whole with it."""
    return _with_empty(batch, np.ones(batch.row_count, np.bool_))


def _fault(batch: LogprobBatch, row: int, limits: Limits) -> ContractError | None:
    try:
        encode(batch.select([row]), limits)
    except ContractError as error:
        return error
    return None


def _with_empty(batch: LogprobBatch, wrong: "np.ndarray") -> LogprobBatch:
    """Return the batch with nothing in some rows, which are behind the others then: their places say where they are."""
    columns = batch.select(np.flatnonzero(~wrong)).columns
    places = np.flatnonzero(wrong)
    for name in ("request_keys", "batch_indices", "positions"):
        columns[name] = np.concatenate([columns[name], getattr(batch, name)[places]])
    for name, value in _EMPTY_ROWS.items():
        columns[name] = np.concatenate([columns[name], np.full(places.size, value, np.uint8)])
    return LogprobBatch.of_views(batch.header, columns)
