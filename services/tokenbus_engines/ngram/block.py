"""Block: the tokens of a step, and what becomes of the requests that they are for."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import RowStatus
from tokenbus_engines.ngram.counting import Ids
from tokenbus_engines.ngram.model import Model
from tokenbus_engines.ngram.rows import Rows
from tokenbus_engines.ngram.speculation import Drafted, Emitted, propose, single, verify


class Block(NamedTuple):
    """What a step computed for some slots: those that go on come first, then those with their first token."""

    slots: Ids
    emitted: Emitted
    drafted: Drafted | None
    """Of the slots that go on, if the draft proposed anything."""


class Outcome(NamedTuple):
    """Of a block's rows: how many tokens are kept, and what became of the request."""

    kept: Ids
    statuses: npt.NDArray[np.uint8]


def computed(model: Model, rows: Rows, decode: Ids, first: Ids, speculate: int) -> Block:
    """Compute a step: the draft proposes and the target verifies; a first token is the target's alone."""
    slots = np.concatenate([decode, first]) if first.size else decode
    if not (speculate and decode.size):
        return Block(slots, single(model, rows.going(slots)), None)
    going = rows.going(decode)
    given = None
    if rows.has_proposals[decode].any():
        given = rows.proposals[decode]
        given[~rows.has_proposals[decode]] = -1
        rows.has_proposals[decode] = False
    drafted = propose(model, going, speculate, given)
    emitted = verify(model, going, drafted)
    if first.size:
        emitted = _below(emitted, single(model, rows.going(first)))
    return Block(slots, emitted, drafted)


def outcome(rows: Rows, block: Block, end_token: int) -> Outcome:
    """Say how many tokens of each row are kept, and whether its request goes on.

    The first of what ends it counts: the end token, one of its own stops, or its length.
    """
    slots, tokens, counts = block.slots, block.emitted.tokens, block.emitted.counts
    room = np.minimum(counts, rows.ends[slots] - rows.positions[slots])
    is_end = (tokens == end_token) & ~rows.ignores_end[slots][:, None]
    stops = np.where(is_end.any(1), np.argmax(is_end, axis=1), tokens.shape[1])
    for row in rows.has_stopping[slots].nonzero()[0].tolist():
        place = rows.stoppings[int(slots[row])].place_of_end(tokens[row, : room[row]].tolist())
        if place is not None:
            stops[row] = min(stops[row], place)
    kept = np.minimum(room, stops + 1)
    statuses = np.full(slots.size, RowStatus.ACTIVE, np.uint8)
    statuses[rows.positions[slots] + kept >= rows.ends[slots]] = RowStatus.FINISHED_LENGTH
    statuses[stops < room] = RowStatus.FINISHED_STOP
    return Outcome(kept, statuses)


def _below(upper: Emitted, lower: Emitted) -> Emitted:
    """Return the rows of both; lines of one token have nothing behind it."""
    missing = upper.tokens.shape[1] - lower.tokens.shape[1]

    def _joined(above: Ids, below: Ids) -> Ids:
        return np.concatenate([above, np.pad(below, ((0, 0), (0, missing)), constant_values=-1)])

    return Emitted(
        _joined(upper.tokens, lower.tokens),
        _joined(upper.contexts, lower.contexts),
        _joined(upper.places, lower.places),
        np.concatenate([upper.counts, lower.counts]),
        np.concatenate([upper.after, lower.after]),
    )
