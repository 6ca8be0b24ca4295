"""Checks of tokens, proposals and alternatives: lengths, values, order and agreement."""

import math

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.batch import LogprobBatch
from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.generated.enums import Scoring, ValueKind
from tokenbus_contracts.limits import Limits
from tokenbus_contracts.schema import COLUMN
from tokenbus_contracts.validate.rows import Shape, check_length, check_range

Values = npt.NDArray[np.float32]

_RANKS = COLUMN["ranks"]
_LARGEST = float(np.finfo(np.float32).max)
_LOGITS = (ValueKind.RAW_LOGITS, ValueKind.PROCESSED_LOGITS)


def check_tokens(batch: LogprobBatch, limits: Limits, shape: Shape) -> None:
    """Check the lengths of the ragged columns, and each id, rank and value."""
    check_length("token_ids", batch.token_ids, shape.tokens, "one for each token")
    check_length("logprobs", batch.logprobs, shape.scored_tokens, "one for each scored token")
    check_length("ranks", batch.ranks, shape.scored_tokens, "one for each scored token")
    wanted = "top_k for each token"
    check_length("alternative_token_ids", batch.alternative_token_ids, shape.alternatives, wanted)
    check_length("alternative_logprobs", batch.alternative_logprobs, shape.alternatives, wanted)
    check_length("proposal_token_ids", batch.proposal_token_ids, shape.proposals, "one for each proposal")
    most = highest_token_id(batch, limits)
    check_range("token_ids", batch.token_ids, most)
    check_range("proposal_token_ids", batch.proposal_token_ids, most)
    if shape.scored_tokens:
        check_range("ranks", batch.ranks, batch.header.vocabulary_size or _RANKS.max, _RANKS.min)
        highest, lowest = np.maximum.reduce(batch.logprobs), np.minimum.reduce(batch.logprobs)
        # If any value is NaN, both results are NaN, and every comparison with NaN fails.
        if not (highest <= ceiling(batch) and lowest >= -_LARGEST):
            refuse_value("logprobs", batch.logprobs, ceiling(batch))


def ceiling(batch: LogprobBatch) -> float:
    """Return the largest valid value for the batch's value kind."""
    return _LARGEST if batch.header.value_kind in _LOGITS else 0.0


def highest_token_id(batch: LogprobBatch, limits: Limits) -> int:
    """Return the largest valid token id, which is below the vocabulary size if the size is known."""
    vocabulary = batch.header.vocabulary_size
    return min(limits.max_token_id, vocabulary - 1) if vocabulary else limits.max_token_id


def refuse_value(name: str, values: npt.NDArray[np.float32], most: float, least: float = -_LARGEST) -> None:
    """Raise a ContractError for the first value that is infinite, NaN or out of bounds."""
    for element, value in enumerate(values.tolist()):
        if not math.isfinite(value):
            raise ContractError(f"{name}[{element}]", "a finite number", value, rule=Rule.FINITE)
        if value > most:
            raise ContractError(f"{name}[{element}]", most, value, rule=Rule.MAX)
        if value < least:
            raise ContractError(f"{name}[{element}]", least, value, rule=Rule.MIN)


def check_alternatives(batch: LogprobBatch, limits: Limits, shape: Shape) -> None:
    """Check the alternatives of a batch that has any: their ids, values and order, and the sampled tokens' ranks."""
    check_range("alternative_token_ids", batch.alternative_token_ids, highest_token_id(batch, limits))
    sampled = _Sampled(batch, shape)
    _check_order(batch, sampled)
    _check_agreement(batch, sampled)


class _Sampled:
    """The sampled tokens that have alternatives, with the ranges of their alternatives."""

    def __init__(self, batch: LogprobBatch, shape: Shape) -> None:
        self.places = np.flatnonzero(shape.top_ks)
        """The indexes of the sampled tokens in the columns of scored tokens."""
        of_scored = batch.token_ids
        if of_scored.size != shape.scored_tokens:
            of_scored = of_scored[np.repeat(batch.scorings != Scoring.NONE, batch.token_counts)]
        self.ids = of_scored[self.places]
        self.logprobs = batch.logprobs[self.places]
        self.ranks = batch.ranks[self.places]
        self.top_ks = shape.top_ks[self.places]
        ends = np.add.accumulate(self.top_ks)
        self.starts = ends - self.top_ks
        self.lasts = ends - 1


def _check_order(batch: LogprobBatch, sampled: _Sampled) -> None:
    values, ids = batch.alternative_logprobs, batch.alternative_token_ids
    # If the order is correct, a token's first alternative has the largest value, and the last has the smallest value.
    # Therefore, only the first and the last value need a check of bounds.
    # A NaN counts as out of order. If a token's only value is NaN, the bounds check refuses the value.
    highest = np.maximum.reduce(values[sampled.starts])
    lowest = np.minimum.reduce(values[sampled.lasts])
    if not (highest <= ceiling(batch) and lowest >= -_LARGEST):
        refuse_value("alternative_logprobs", values, ceiling(batch))
    descends = np.empty(values.size, np.bool_)
    np.less(values[1:], values[:-1], out=descends[:-1])
    descends[sampled.lasts] = True  # values of different tokens need no order
    if np.count_nonzero(descends) == descends.size:
        return
    ties = np.flatnonzero(~descends)
    right = (values[ties] == values[ties + 1]) & (ids[ties] < ids[ties + 1])
    if not right.all():
        refuse_value("alternative_logprobs", values, ceiling(batch))
        element = int(ties[right.argmin()])
        value, after = values[element : element + 2].tolist()
        if value != after:
            field = f"alternative_logprobs[{element + 1}]"
            raise ContractError(field, f"at most {value}, the one before it", after, rule=Rule.ORDER)
        token_id, after_id = ids[element : element + 2].tolist()
        field = f"alternative_token_ids[{element + 1}]"
        raise ContractError(field, f"above {token_id}, whose value is the same", after_id, rule=Rule.ORDER)


def _check_agreement(batch: LogprobBatch, sampled: _Sampled) -> None:
    """Check that each token's rank and value fit its alternatives."""
    values, ids = batch.alternative_logprobs, batch.alternative_token_ids
    at_rank = np.minimum(sampled.ranks, sampled.top_ks)
    elements = sampled.starts + at_rank
    elements -= 1
    value_there = values[elements]
    same = value_there == sampled.logprobs
    # The alternative at a token's rank has the token's value, unless the rank exceeds the number of alternatives.
    if np.count_nonzero(same) != same.size:
        right = same | ((sampled.ranks > sampled.top_ks) & (value_there > sampled.logprobs))
        if not right.all():
            token = int(right.argmin())
            limit = (
                f"a rank that fits logprob {float(sampled.logprobs[token])} "
                f"beside {float(value_there[token])} at place {int(at_rank[token])} of the alternatives"
            )
            field = f"ranks[{int(sampled.places[token])}]"
            raise ContractError(field, limit, int(sampled.ranks[token]), rule=Rule.AGREEMENT)
    # A sampled token that is also an alternative must have the same value in both columns.
    # An alternative at its token's rank was compared above. If no other alternative has its token's id, the check ends.
    own = np.repeat(sampled.ids, sampled.top_ks) == ids
    same &= ids[elements] == sampled.ids
    if np.count_nonzero(own) == np.count_nonzero(same):
        return
    elsewhere = np.flatnonzero(own)
    tokens = sampled.starts.searchsorted(elsewhere, side="right") - 1
    wrong = values[elsewhere] != sampled.logprobs[tokens]
    if wrong.any():
        token, element = int(tokens[wrong.argmax()]), int(elsewhere[wrong.argmax()])
        own = float(sampled.logprobs[token])
        limit = f"{own}, the value of the same token in logprobs[{int(sampled.places[token])}]"
        raise ContractError(f"alternative_logprobs[{element}]", limit, float(values[element]), rule=Rule.AGREEMENT)
