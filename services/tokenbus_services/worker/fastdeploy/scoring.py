"""From an op's tensors to the logprobs of a message's tokens."""

from typing import NamedTuple

import numpy as np

from tokenbus_contracts import ContractError, Rule
from tokenbus_services.worker.fastdeploy import inputs
from tokenbus_services.worker.fastdeploy.layout import COLUMNS
from tokenbus_services.worker.fastdeploy.message import Floats, Integers, Scores, Tensor

_LOWEST = np.float32(-9999)
"""What an engine computes as minus infinity."""


class ScoreTensors(NamedTuple):
    """What an op is given of its tokens' logprobs, and what it calls them."""

    ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    names: tuple[str, str, str] = ("logprob_token_ids", "logprob_scores", "logprob_ranks")


def scores_of(given: ScoreTensors, sampled: Integers, places: Integers) -> Scores:
    """Return the values of the sampled tokens, which are at some places of what is flat by token."""
    ids_name, values_name, ranks_name = given.names
    ids = inputs.table(ids_name, given.ids, COLUMNS)
    values = inputs.table(values_name, given.logprobs, COLUMNS)
    if values.dtype.kind != "f":
        raise ContractError(values_name, "floats", values.dtype.name, rule=Rule.TYPE)
    if values.shape != ids.shape:
        limit = f"shape {ids.shape}, as {ids_name}"
        raise ContractError(values_name, limit, f"shape {values.shape}", rule=Rule.LENGTH)
    needed = int(places[-1]) + 1 if places.size else 0
    if ids.shape[0] < needed:
        raise ContractError(ids_name, f"{needed} lines, one for each token", ids.shape[0], rule=Rule.LENGTH)
    own = inputs.line(ranks_name, given.ranks, needed, "token")[places]
    table: Integers = inputs.integers(ids_name, ids)[places]
    # Before ties are looked for: what is minus infinity is one value then.
    numbers: Floats = np.maximum(values[places], _LOWEST, dtype=np.float32)
    found = Scores(logprobs=numbers[:, 0], ranks=own, alternative_ids=table[:, 1:], alternative_logprobs=numbers[:, 1:])
    return _of_sampled(sampled, table[:, 0], _in_order(found))


def _in_order(found: Scores) -> Scores:
    """Return scores whose alternatives of one value come by the lower id: an engine has them in any order."""
    ids, values = found.alternative_ids, found.alternative_logprobs
    ties = values[:, 1:] == values[:, :-1]
    if not ties.any():
        return found
    wrong = np.flatnonzero((ties & (ids[:, 1:] < ids[:, :-1])).any(axis=1))
    order = np.lexsort((ids[wrong], -values[wrong]), axis=1)
    ids, values = ids.copy(), values.copy()
    ids[wrong] = np.take_along_axis(ids[wrong], order, axis=1)
    values[wrong] = np.take_along_axis(values[wrong], order, axis=1)
    return Scores(logprobs=found.logprobs, ranks=found.ranks, alternative_ids=ids, alternative_logprobs=values)


def _of_sampled(sampled: Integers, scored: Integers, found: Scores) -> Scores:
    """Return scores in which a token that took the place of the scored one has its own logprob, where that is known.

    The engine does so where a request reaches its longest output, and is to end with an end token.
    """
    others = np.flatnonzero(sampled != scored)
    if not others.size:
        return found
    own = found.alternative_ids[others] == sampled[others, None]
    known = np.flatnonzero(own.any(axis=1))
    tokens, at = others[known], own[known].argmax(axis=1)
    logprobs, ranks = found.logprobs.copy(), found.ranks.copy()
    logprobs[tokens] = found.alternative_logprobs[tokens, at]
    ranks[tokens] = at + 1
    return Scores(
        logprobs=logprobs,
        ranks=ranks,
        alternative_ids=found.alternative_ids,
        alternative_logprobs=found.alternative_logprobs,
    )
