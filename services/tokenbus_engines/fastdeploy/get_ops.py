"""The get ops, by that engine's names and positions.

Each fills the tensors that it is given where they lie, as that engine's own ops do, and touches nothing else in them.
A message that does not fit them is an error, and stays the next one.
"""

from typing import Any

import numpy as np

from tokenbus_contracts import ContractError, Rule
from tokenbus_engines.fastdeploy.message import (
    ALTERNATIVES,
    COLUMNS,
    FLAG_BITS,
    NOTHING,
    NOTHING_READ,
    SLOTS,
    SPECULATIVE_SLOTS,
    TOKENS,
    Integers,
    Kind,
    Message,
    Tensor,
)
from tokenbus_engines.fastdeploy.process import PROCESS
from tokenbus_engines.fastdeploy.tensors import Output
from tokenbus_services.worker.arrays import Host

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
    _get_scored(Kind.SPECULATED_SCORED, (output_tokens, output_scores, output_ranks), real_k, wait=wait_flag)


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
    message = _next(Kind.SPECULATED, tokens, _PLAIN_META, wait=wait_flag)
    if message is None:
        return
    tokens.flat[:size] = 0
    tokens.flat[0], tokens.flat[1] = message.stop_flag, message.slots
    tokens.flat[_PLAIN_META : _PLAIN_META + message.slots] = message.counts
    tokens.flat[_PLAIN_META + SPECULATIVE_SLOTS : size][_places(message)] = message.tokens[:, 0]
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
    _get_scored(Kind.SINGLE_SCORED, (output_tokens, output_scores, output_ranks), k, wait=wait_flag)


def get_output(output_tokens: Tensor, rank_id: int, wait_flag: bool, /) -> None:  # noqa: FBT001 - as above
    """Get the next step without speculation and without logprobs; -2 as the stop flag says that there is none."""
    if rank_id <= 0:
        get_output_ep(output_tokens, rank_id, wait_flag)


def get_output_ep(output_tokens: Tensor, rank_id: int, wait_flag: bool, /) -> None:  # noqa: FBT001 - as above
    """Get the next step as `get_output` does, on every rank: under data parallelism each has a queue of its own."""
    del rank_id  # the environment names the queue
    tokens = Output("output_tokens", output_tokens, _PLAIN_META + SLOTS, np.int64)
    message = _next(Kind.SINGLE, tokens, _PLAIN_META, wait=wait_flag)
    if message is None:
        return
    tokens.flat[_PLAIN_META : _PLAIN_META + message.slots] = message.tokens[:, 0]
    tokens.flat[0], tokens.flat[1] = message.stop_flag, message.slots
    _store(tokens)


def _get_scored(kind: Kind, outputs: tuple[Tensor, Tensor, Tensor], k: int, *, wait: bool) -> None:
    """Get the next message with scores: its fields, a speculative one's counts, and columns for each slot's tokens."""
    if not 0 <= k <= ALTERNATIVES:
        raise ContractError("real_k", f"0 to {ALTERNATIVES}", k, rule=Rule.NAMED)
    meta, first, each = (_PLAIN_META, _PLAIN_META, 1) if kind.is_single else (_META, _META + SLOTS, TOKENS)
    lines = SLOTS * each
    tokens = Output("output_tokens", outputs[0], first + lines * COLUMNS, np.int64)
    scores = Output("output_scores", outputs[1], lines * COLUMNS, np.float32)
    ranks = Output("output_ranks", outputs[2], lines, np.int64)
    message = _next(kind, tokens, meta, wait=wait)
    if message is None:
        return
    shape = (SLOTS, each, COLUMNS)
    ids = tokens.flat[first:][: lines * COLUMNS].reshape(shape)
    _fill(ids, scores.flat[: lines * COLUMNS].reshape(shape), ranks.flat[:lines].reshape(shape[:2]), message, k)
    tokens.flat[0], tokens.flat[meta - 1] = message.stop_flag, message.slots
    if not kind.is_single:
        # A field of its own in a message; only that engine's tensor has no other place for the columns.
        columns = min(message.columns, k + 1) << FLAG_BITS if PROCESS.options.columns_in_flag else 0
        tokens.flat[1] = message.flag | columns
        tokens.flat[meta : meta + message.slots] = message.counts
    _store(tokens, scores, ranks)


def _next(kind: Kind, tokens: Output, meta: int, *, wait: bool) -> Message | None:
    """Return the next message, or None, and the tensor says that there is none."""
    message = PROCESS.receiver().peek(None if wait else 0.0)
    if message is None:
        tokens.flat[:meta] = 0
        tokens.flat[0] = NOTHING_READ
        tokens.store()
    elif message.kind is not kind:
        limit = f"one of {kind.name.lower()}, as this op reads it"
        raise ContractError("message", limit, message.kind.name.lower(), rule=Rule.KIND)
    return message


def _places(message: Message) -> Integers:
    """Return which place of all slots' places each token has."""
    own = message.token_counts
    first = np.arange(own.size) * TOKENS - (np.cumsum(own) - own)
    places: Integers = np.arange(message.tokens.shape[0]) + np.repeat(first, own)
    return places


def _fill(ids: Host, values: Host, ranks: Host, message: Message, k: int) -> None:
    """Fill the lines of tokens with as many columns as are wanted; those that were not saved are blank."""
    columns, count = min(message.columns, k + 1), message.slots
    most = int(message.counts.max()) if count else 0
    if most <= 0:
        return
    if int(message.counts.min()) == most:  # as in most steps: no place has to be looked up
        lines = (count, most, message.columns)
        found, scores, own = (
            message.tokens.reshape(lines),
            message.scores.reshape(lines),
            message.ranks.reshape(lines[:2]),
        )
        into: Any = (slice(0, count), slice(0, most))
    else:
        found, scores, own = message.tokens, message.scores, message.ranks
        into = np.divmod(_places(message), TOKENS)
    if columns == k + 1 == COLUMNS:
        ids[into], values[into] = found, scores
    else:
        blank = slice(columns, k + 1)
        ids[(*into, slice(0, columns))], values[(*into, slice(0, columns))] = (
            found[..., :columns],
            scores[..., :columns],
        )
        ids[(*into, blank)], values[(*into, blank)] = NOTHING, 0
    ranks[into] = own


def _store(*outputs: Output) -> None:
    for output in outputs:
        output.store()
    PROCESS.receiver().pop()
