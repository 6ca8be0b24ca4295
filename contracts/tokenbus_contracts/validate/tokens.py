"""Checks of the token columns and the proposals: their lengths, and each value by itself."""

import math

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.batch import LogprobBatch
from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.generated.enums import ValueKind
from tokenbus_contracts.limits import Limits
from tokenbus_contracts.schema import COLUMN
from tokenbus_contracts.validate.shape import Shape

_RANK_MIN = COLUMN["ranks"].min
_RANK_MAX = COLUMN["ranks"].max
_LARGEST = float(np.finfo(np.float32).max)
_LOGITS = (ValueKind.RAW_LOGITS, ValueKind.PROCESSED_LOGITS)


def check_tokens(batch: LogprobBatch, limits: Limits, shape: Shape) -> None:
    """Check the lengths of the ragged columns, and ids, ranks and values one by one."""
    _check_length("token_ids", batch.token_ids, shape.tokens, "one for each token")
    _check_length("logprobs", batch.logprobs, shape.scored_tokens, "one for each scored token")
    _check_length("ranks", batch.ranks, shape.scored_tokens, "one for each scored token")
    wanted = "top_k for each token"
    _check_length("alternative_token_ids", batch.alternative_token_ids, shape.alternatives, wanted)
    _check_length("alternative_logprobs", batch.alternative_logprobs, shape.alternatives, wanted)
    _check_length("proposal_token_ids", batch.proposal_token_ids, shape.proposals, "one for each proposal")
    most = highest_token_id(batch, limits)
    check_ids("token_ids", batch.token_ids, most)
    check_ids("proposal_token_ids", batch.proposal_token_ids, most)
    if shape.scored_tokens:
        _check_ranks(batch.ranks, batch.header.vocabulary_size or _RANK_MAX)
        highest, lowest = np.maximum.reduce(batch.logprobs), np.minimum.reduce(batch.logprobs)
        # A NaN anywhere makes both of them NaN, and no comparison with NaN holds.
        if not (highest <= ceiling(batch) and lowest >= -_LARGEST):
            refuse_value("logprobs", batch.logprobs, ceiling(batch))


def ceiling(batch: LogprobBatch) -> float:
    """Return the largest value that the batch's numbers may have."""
    return _LARGEST if batch.header.value_kind in _LOGITS else 0.0


def highest_token_id(batch: LogprobBatch, limits: Limits) -> int:
    """Return the largest valid token id: below the vocabulary's size where that is known."""
    vocabulary = batch.header.vocabulary_size
    return min(limits.max_token_id, vocabulary - 1) if vocabulary else limits.max_token_id


def check_ids(name: str, ids: npt.NDArray[np.uint32], most: int) -> None:
    """Refuse a token id that the model does not have."""
    if ids.size and np.maximum.reduce(ids) > most:
        element = int((ids > most).argmax())
        raise ContractError(f"{name}[{element}]", most, int(ids[element]), rule=Rule.MAX)


def refuse_value(name: str, values: npt.NDArray[np.float32], most: float) -> None:
    """Raise the error for the first value that is no finite number, or is above the largest valid one."""
    for element, value in enumerate(values.tolist()):
        if not math.isfinite(value):
            raise ContractError(f"{name}[{element}]", "a finite number", value, rule=Rule.FINITE)
        if value > most:
            raise ContractError(f"{name}[{element}]", most, value, rule=Rule.MAX)


def _check_length(name: str, column: npt.NDArray[np.generic], wanted: int, reason: str) -> None:
    if column.size != wanted:
        raise ContractError(name, f"{wanted} elements, {reason}", column.size, rule=Rule.LENGTH)


def _check_ranks(ranks: npt.NDArray[np.uint32], most: int) -> None:
    if np.minimum.reduce(ranks) < _RANK_MIN:
        element = int(ranks.argmin())
        raise ContractError(f"ranks[{element}]", _RANK_MIN, int(ranks[element]), rule=Rule.MIN)
    if np.maximum.reduce(ranks) > most:
        element = int((ranks > most).argmax())
        raise ContractError(f"ranks[{element}]", most, int(ranks[element]), rule=Rule.MAX)
