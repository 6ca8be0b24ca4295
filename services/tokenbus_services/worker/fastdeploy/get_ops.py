"""The get ops, by that engine's names and positions.

Each fills the tensors that it is given where they lie, as that engine's own ops do, and touches nothing else in them.
A message that does not fit them is an error, and stays the next one.
"""

import numpy as np

from tokenbus_contracts import ContractError, Rule
from tokenbus_services.worker.fastdeploy import environment
from tokenbus_services.worker.fastdeploy.filling import Output, counts_with_proposals, token_entries
from tokenbus_services.worker.fastdeploy.layout import (
    ALTERNATIVES,
    COLUMNS,
    FLAG_BITS,
    NOTHING,
    NOTHING_READ,
    SLOTS,
    SPECULATIVE_SLOTS,
    TOKENS,
    MessageFlag,
)
from tokenbus_services.worker.fastdeploy.message import Integers, Message, Tensor
from tokenbus_services.worker.fastdeploy.process import PROCESS

_META = 3
_PLAIN_META = 2


def speculate_get_output_topk(  # noqa: PLR0913, PLR0917 - by that engine's positions
    output_tokens: Tensor,
    output_scores: Tensor,
    output_ranks: Tensor,
    real_k: int,
    rank_id: int,
    wait_flag: bool,  # noqa: FBT001 - as above
    /,
) -> None:
    """Get the next target or draft under speculation, with logprobs; -2 as the stop flag says that there is none."""
    del rank_id  # each rank has a queue of its own, which the environment names
    _check_k(real_k)
    tokens = Output("output_tokens", output_tokens, _META + SLOTS + SLOTS * TOKENS * COLUMNS, np.int64)
    scores = Output("output_scores", output_scores, SLOTS * TOKENS * COLUMNS, np.float32)
    ranks = Output("output_ranks", output_ranks, SLOTS * TOKENS, np.int64)
    message = PROCESS.receiver().peek(wait=wait_flag)
    if message is None:
        _store_nothing(tokens, _META)
        return
    _check_scored(message, is_wanted=True)
    counts = counts_with_proposals(message, SLOTS)
    columns = min(message.scores.columns if message.scores is not None else 1, real_k + 1)
    (slots, places), ids = token_entries(message)
    by_place = tokens.flat[_META + SLOTS :][: SLOTS * TOKENS * COLUMNS].reshape(SLOTS, TOKENS, COLUMNS)
    values = scores.flat[: SLOTS * TOKENS * COLUMNS].reshape(SLOTS, TOKENS, COLUMNS)
    by_place[slots, places, : real_k + 1] = NOTHING
    values[slots, places, : real_k + 1] = 0
    by_place[slots, places, 0] = ids
    own_ranks = np.zeros(ids.size, np.int64)
    if message.scores is not None:
        scored = message.token_ids.size  # what comes with a token has no values
        slots_scored, places_scored = slots[:scored], places[:scored]
        by_place[slots_scored, places_scored, 1:columns] = message.scores.alternative_ids[:, : columns - 1]
        values[slots_scored, places_scored, 0] = message.scores.logprobs
        values[slots_scored, places_scored, 1:columns] = message.scores.alternative_logprobs[:, : columns - 1]
        own_ranks[:scored] = message.scores.ranks
    ranks.flat[slots * TOKENS + places] = own_ranks
    tokens.flat[0] = _stop_flag(message)
    # A field of its own on the bus; only that engine's tensor has no other place for the columns.
    tokens.flat[1] = message.flag | (columns << FLAG_BITS if PROCESS.options.columns_in_flag else 0)
    tokens.flat[2] = message.slots
    tokens.flat[_META : _META + message.slots] = counts
    _store(tokens, scores, ranks)


def speculate_get_output(
    output_tokens: Tensor,
    rank_id: int,
    wait_flag: bool,  # noqa: FBT001 - by that engine's positions
    get_each_rank: bool = False,  # noqa: FBT001, FBT002 - as above
    /,
) -> None:
    """Get the next step under speculation, without logprobs; -2 as the stop flag says that there is none."""
    if rank_id > 0 and not get_each_rank:
        return
    size = _PLAIN_META + SPECULATIVE_SLOTS + SPECULATIVE_SLOTS * TOKENS
    tokens = Output("output_tokens", output_tokens, size, np.int64)
    message = PROCESS.receiver().peek(wait=wait_flag)
    if message is None:
        _store_nothing(tokens, _PLAIN_META)
        return
    _check_scored(message, is_wanted=False)
    counts = counts_with_proposals(message, SPECULATIVE_SLOTS)
    (slots, places), ids = token_entries(message)
    tokens.flat[:size] = 0
    tokens.flat[0], tokens.flat[1] = _stop_flag(message), message.slots
    tokens.flat[_PLAIN_META : _PLAIN_META + message.slots] = counts
    tokens.flat[_PLAIN_META + SPECULATIVE_SLOTS + slots * TOKENS + places] = ids
    _store(tokens)


def get_output_topk(  # noqa: PLR0913, PLR0917 - by that engine's positions
    output_tokens: Tensor,
    output_scores: Tensor,
    output_ranks: Tensor,
    k: int,
    rank_id: int,
    wait_flag: bool,  # noqa: FBT001 - as above
    /,
) -> None:
    """Get the next step without speculation, with logprobs; -2 as the stop flag says that there is none."""
    del rank_id  # as in speculate_get_output_topk
    _check_k(k)
    tokens = Output("output_tokens", output_tokens, _PLAIN_META + SLOTS * COLUMNS, np.int64)
    scores = Output("output_scores", output_scores, SLOTS * COLUMNS, np.float32)
    ranks = Output("output_ranks", output_ranks, SLOTS, np.int64)
    message = PROCESS.receiver().peek(wait=wait_flag)
    if message is None:
        _store_nothing(tokens, _PLAIN_META)
        return
    _check_scored(message, is_wanted=True)
    count = message.slots
    by_slot = tokens.flat[_PLAIN_META:][: count * COLUMNS].reshape(count, COLUMNS)
    values = scores.flat[: count * COLUMNS].reshape(count, COLUMNS)
    by_slot[:, : k + 1] = NOTHING
    values[:, : k + 1] = 0
    by_slot[:, 0] = _one_of_each_slot(message)
    ranks.flat[:count] = 0
    if message.scores is not None:
        with_token = np.flatnonzero(message.counts > 0)
        columns = min(message.scores.columns, k + 1)
        by_slot[with_token, 1:columns] = message.scores.alternative_ids[:, : columns - 1]
        values[with_token, 0] = message.scores.logprobs
        values[with_token, 1:columns] = message.scores.alternative_logprobs[:, : columns - 1]
        ranks.flat[with_token] = message.scores.ranks
    tokens.flat[0], tokens.flat[1] = _stop_flag(message), count
    _store(tokens, scores, ranks)


def get_output(output_tokens: Tensor, rank_id: int, wait_flag: bool, /) -> None:  # noqa: FBT001 - as above
    """Get the next step without speculation and without logprobs; -2 as the stop flag says that there is none."""
    if rank_id > 0:
        return
    tokens = Output("output_tokens", output_tokens, _PLAIN_META + SLOTS, np.int64)
    message = PROCESS.receiver().peek(wait=wait_flag)
    if message is None:
        _store_nothing(tokens, _PLAIN_META)
        return
    _check_scored(message, is_wanted=False)
    tokens.flat[_PLAIN_META : _PLAIN_META + message.slots] = _one_of_each_slot(message)
    tokens.flat[0], tokens.flat[1] = _stop_flag(message), message.slots
    _store(tokens)


def _one_of_each_slot(message: Message) -> Integers:
    """Return the token of each slot, or what says that there is none."""
    counts = counts_with_proposals(message, SLOTS)
    beyond = np.flatnonzero(counts > 1)
    if beyond.size:
        raise ContractError(f"message.counts[{int(beyond[0])}]", 1, int(counts[beyond[0]]), rule=Rule.MAX)
    found: Integers = np.where(counts == 0, NOTHING, counts)
    found[counts > 0] = message.token_ids
    return found


def _stop_flag(message: Message) -> int:
    return environment.message_id() * (1 if message.is_running else -1)


def _check_k(k: int) -> None:
    if not 0 <= k <= ALTERNATIVES:
        raise ContractError("real_k", f"0 to {ALTERNATIVES}", k, rule=Rule.NAMED)


def _check_scored(message: Message, *, is_wanted: bool) -> None:
    """Refuse a message of another kind of save op: the engine's processes were told different things."""
    if not is_wanted and message.flag is MessageFlag.DRAFT:
        raise ContractError("message", "a target: this op has no place for the message flag", "a draft", rule=Rule.KIND)
    is_scored = message.scores is not None
    if is_scored is not is_wanted and (is_scored or message.token_ids.size):
        kinds = {True: "logprobs", False: "no logprobs"}
        limit = f"one with {kinds[is_wanted]}, as this op reads it"
        raise ContractError("message", limit, f"one with {kinds[is_scored]}", rule=Rule.SCORING)


def _store_nothing(tokens: Output, meta: int) -> None:
    tokens.flat[:meta] = 0
    tokens.flat[0] = NOTHING_READ
    tokens.store()


def _store(*outputs: Output) -> None:
    for output in outputs:
        output.store()
    PROCESS.receiver().pop()
