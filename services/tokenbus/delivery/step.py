"""Step: what one forward pass of an engine emitted, whole and in original batch order; and its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from tokenbus.delivery.ack_tracker import PendingAck
from tokenbus_contracts import LogprobBatch, Row, RowStatus, Scoring
from tokenbus_contracts.extras import Extras

FINISHED = frozenset({RowStatus.FINISHED_STOP, RowStatus.FINISHED_LENGTH, RowStatus.ABORTED, RowStatus.UNRECOVERABLE})
"""The statuses of a request's last row."""
LEAVES = np.isin(np.arange(256), [int(status) for status in (*FINISHED, RowStatus.HANDED_OFF)])
"""By status, whether a row with it is its request's last in this stream."""
_UNSCORED, _SHED = int(Scoring.NONE), int(Scoring.SHED)


class Token(NamedTuple):
    """One token of a request.

    `logprob` and `rank` are None where the request asked for ids only. `alternatives` holds pairs of a token id and its
    logprob, the most probable first. `is_shed` says that a worker without room dropped the alternatives on the way.

    Example:
        token = tokenbus.Token(id=42, position=0, logprob=-0.5, rank=1, alternatives=((42, -0.5),), request_id=7)
        assert token.rank == 1
    """

    id: int
    """The token id; zero is a token like any other."""
    position: int
    """Its place among the request's generated tokens, from 0."""
    logprob: float | None
    """Its natural-log probability, at most 0; None where the request asked for ids only."""
    rank: int | None
    """Its place by probability, from 1; None where the request asked for ids only."""
    alternatives: tuple[tuple[int, float], ...]
    """Token ids and logprobs, the most probable first."""
    request_id: int
    """The request that it belongs to."""
    is_shed: bool = False
    """Whether its alternatives were dropped on the way, because a worker had no room for them."""
    weight_version: int = 0
    """The version of the weights that computed it; 0: not known."""
    extras: "TokenExtras | None" = None
    """What the request asked for beyond that; None: nothing, or a worker without room dropped it."""


class TokenExtras(NamedTuple):
    """What one token has beyond its logprob, where its request asked for it.

    Example:
        async with tokenbus.connect(address) as client:
            async for token in client.generate([1, 2, 3], max_tokens=4, other_logprobs=True, entropies=True):
                print(token.logprob - token.extras.other_logprob, token.extras.entropy)
    """

    other_logprob: float | None
    """Its logprob in the other distribution: the one sampled from if `logprob` is the model's own, or reverse."""
    entropy: float | None
    """The entropy of the distribution that `logprob` is of, in nats."""
    given_logprobs: tuple[tuple[int, float], ...]
    """The ids that the request gave, and the logprob of each."""
    mask_size: int | None
    """How many tokens sampling could have chosen."""
    mask: tuple[int, ...] | None
    """Which ones, if they are no more than the request's `mask_bound`."""


def extras_by_token(extras: Extras | None, tokens: int) -> list[TokenExtras | None]:
    """Return the extras of each of a row's tokens."""
    if extras is None:
        return [None] * tokens
    other, entropies, sizes = (
        values.tolist() if values.size else [None] * tokens
        for values in (extras.other_logprobs, extras.entropies, extras.mask_sizes)
    )
    ids = extras.given_token_ids.tolist()
    given = [tuple(zip(ids, values, strict=True)) for values in extras.given_logprobs.tolist()]
    masks: list[tuple[int, ...] | None] = [None if mask is None else tuple(mask.tolist()) for mask in extras.masks()]
    return list(map(TokenExtras, other, entropies, given, sizes, masks or [None] * tokens))


class TokenLists:
    """What a batch's tokens are made of, as lists: for all rows at once that costs a tenth of what it costs for each.

    The tokens themselves are made of a row when it is taken, and the alternatives are read then: there may be many.
    """

    def __init__(self, rows: LogprobBatch) -> None:
        counts, self._scorings = rows.token_counts.tolist(), rows.scorings.tolist()
        self._keys, self._positions = rows.request_ids.tolist(), rows.positions.tolist()
        self._token_ids, self._logprobs = rows.token_ids.tolist(), rows.logprobs.tolist()
        self._ranks = rows.ranks.tolist()
        self._starts = self._scored = [0, *accumulate(counts)]
        if _UNSCORED in self._scorings:
            pairs = zip(counts, self._scorings, strict=True)
            self._scored = [0, *accumulate(count * (scoring != _UNSCORED) for count, scoring in pairs)]
        self._rows = rows
        self._has_alternatives = bool(rows.alternative_token_ids.size)
        self._has_extras = rows.has_extras

    def tokens_of(self, place: int) -> list[Token]:
        """Return the tokens of a row, by its place in the columns."""
        key, position, scoring = self._keys[place], self._positions[place], self._scorings[place]
        version = self._rows.header.weight_version
        begin, end, scored = self._starts[place], self._starts[place + 1], self._scored[place]
        is_shed = scoring == _SHED
        alternatives: list[tuple[tuple[int, float], ...]] = []
        if self._has_alternatives:
            alternatives = _pairs(self._rows.row(place))
        extras: Sequence[TokenExtras | None] = ()
        if self._has_extras:
            extras = extras_by_token(self._rows.row(place).extras, end - begin)
        tokens = []
        for at, token_id in enumerate(self._token_ids[begin:end]):
            logprob = rank = None
            if scoring != _UNSCORED:
                logprob, rank = self._logprobs[scored + at], self._ranks[scored + at]
            pairs = alternatives[at] if alternatives else ()
            more = extras[at] if extras else None
            values = (token_id, position + at, logprob, rank, pairs, key, is_shed, version, more)
            tokens.append(tuple.__new__(Token, values))
        return tokens


def _pairs(row: Row) -> list[tuple[tuple[int, float], ...]]:
    tokens = zip(row.alternative_token_ids.tolist(), row.alternative_logprobs.tolist(), strict=True)
    return [tuple(zip(ids, logprobs, strict=True)) for ids, logprobs in tokens]


@dataclass(slots=True, eq=False)
class Step:
    """One step of one stream. Each row in it is new to its request: repeated and foreign rows were taken out.

    Example:
        async with tokenbus.Processor() as processor:
            steps = processor.steps()  # each is a Step: step.target and step.draft are its columns
            await steps.aclose()
    """

    worker_id: str
    epoch: int
    number: int
    rows: LogprobBatch
    """All of the step's rows, in the order in which they came: handing rows to requests needs no other."""
    draft_rows: LogprobBatch | None
    """What the draft model proposed for them, its rows a selection of theirs, in some order."""
    pending_ack: PendingAck = field(default_factory=PendingAck, repr=False)
    first_arrival: float = 0.0
    """When its first part arrived, by the processor's clock."""
    is_whole: bool = True
    """Whether every row of the step is known; the requests of others ended with an error."""
    is_explained: bool = True
    """Whether all rows that are missing are of items that are known to be lost, whose requests have ended."""
    _target: LogprobBatch | None = field(default=None, repr=False)
    _draft: LogprobBatch | None = field(default=None, repr=False)
    _token_lists: TokenLists | None = field(default=None, init=False, repr=False)

    @property
    def sequence(self) -> int:
        """The last sequence that belongs to it."""
        return self.pending_ack.last_sequence

    @property
    def target(self) -> LogprobBatch:
        """All of the step's rows, in original batch order."""
        # Put in order when it is read: that is most of a step's cost, and requests do not need it.
        if self._target is None:
            self._target = self.rows.in_batch_order()
        return self._target

    @property
    def draft(self) -> LogprobBatch | None:
        """What the draft model proposed for them, in original batch order."""
        if self._draft is None and self.draft_rows is not None:
            self._draft = self.draft_rows.in_batch_order()
        return self._draft

    @property
    def token_lists(self) -> TokenLists:
        """The tokens of all of its rows as plain numbers, which iterators over requests' tokens read."""
        if self._token_lists is None:
            self._token_lists = TokenLists(self.rows)
        return self._token_lists

    def keep(self, rows: LogprobBatch, draft_rows: LogprobBatch | None) -> None:
        """Have other rows from now on: what is left after some were taken out."""
        self.rows, self.draft_rows = rows, draft_rows
        self._target = self._draft = self._token_lists = None
