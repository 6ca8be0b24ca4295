"""What a save op says of slots: every bound is checked before anything is kept."""

import numpy as np

from tokenbus_contracts import ContractError, Rule
from tokenbus_services.worker.fastdeploy.layout import (
    NOTHING,
    PREEMPTED,
    UNRECOVERABLE,
    MessageFlag,
)
from tokenbus_services.worker.fastdeploy.message import Flags, Integers


def message_flag(value: int) -> MessageFlag:
    """Return what a message is about; it has a field of its own here, which no other number is put into."""
    try:
        return MessageFlag(int(value))
    except ValueError:
        raise ContractError("message_flag", "3 (target) or 4 (draft)", value, rule=Rule.NAMED) from None


def counts(name: str, given: Integers, most: int, *, prefilling: Flags | None, preempted: Flags | None) -> Integers:
    """Return how many tokens each slot has, or its magic count; a slot whose prompt is not done has none."""
    found = given if prefilling is None else np.where(prefilling, 0, given)
    wrong = np.flatnonzero((found > most) | ((found < 0) & (found != PREEMPTED) & (found != UNRECOVERABLE)))
    if wrong.size:
        slot = int(wrong[0])
        limit = f"0 to {most} tokens, {PREEMPTED} (preempted) or {UNRECOVERABLE} (cannot be recovered)"
        raise ContractError(f"{name}[{slot}]", limit, int(found[slot]), rule=Rule.NAMED)
    return found if preempted is None else np.where(preempted, PREEMPTED, found)


def places_of(found: Integers, offsets: Integers, tokens: int) -> Integers:
    """Return where the tokens of all slots lie in what is flat by token."""
    own = np.maximum(found, 0)
    filled = np.flatnonzero(own)
    begins, ends = offsets[filled], offsets[filled] + own[filled]
    low = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: filled.size]
    wrong = np.flatnonzero((begins < low) | (ends > tokens))
    if wrong.size:
        which = int(wrong[0])
        slot, count = int(filled[which]), int(own[filled[which]])
        limit = f"a place from {int(low[which])} on that leaves {count} of {tokens} tokens"
        raise ContractError(f"cu_batch_token_offset[{slot}]", limit, int(begins[which]), rule=Rule.LENGTH)
    starts = np.cumsum(own) - own
    places: Integers = np.arange(int(own.sum())) + np.repeat(offsets - starts, own)
    return places


def without_nothing(name: str, found: Integers, ids: Integers) -> tuple[Integers, Flags]:
    """Return the counts without the slots whose tokens say that there is none, and which tokens are left.

    A slot says so with its first token. Where a later one does, the engine would lose those before it.
    """
    own = np.maximum(found, 0)
    starts = np.cumsum(own) - own
    filled = np.flatnonzero(own)
    empty = np.zeros(found.size, np.bool_)
    empty[filled] = ids[starts[filled]] == NOTHING
    kept = np.repeat(~empty, own)
    check_ids(name, ids[kept])
    return np.where(empty, 0, found), kept


def counts_of_tokens(name: str, ids: Integers, preempted: Flags | None) -> Integers:
    """Return the counts of slots with one token each, some of which say something else in its place."""
    found = np.where(ids >= 0, 1, np.where(ids == NOTHING, 0, ids))
    if preempted is not None:
        found = np.where(preempted, PREEMPTED, found)
    wrong = np.flatnonzero((found < 0) & (found != PREEMPTED) & (found != UNRECOVERABLE))
    if wrong.size:
        limit = f"a token id, {NOTHING} (none), {PREEMPTED} (preempted) or {UNRECOVERABLE} (cannot be recovered)"
        raise ContractError(f"{name}[{int(wrong[0])}]", limit, int(found[wrong[0]]), rule=Rule.NAMED)
    return found


def check_ids(name: str, ids: Integers) -> None:
    """Refuse what is no token's id."""
    wrong = np.flatnonzero(ids < 0)
    if wrong.size:
        raise ContractError(name, "token ids", int(ids[wrong[0]]), rule=Rule.TYPE)
