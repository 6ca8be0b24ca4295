"""Step: the rows of one forward pass of an engine, and their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from tokenbus.delivery.ack_tracker import PendingAck
from tokenbus_contracts import LogprobBatch, Row, RowStatus, Scoring
from tokenbus_contracts.extras import Extras

FINISHED = frozenset({RowStatus.FINISHED_STOP, RowStatus.FINISHED_LENGTH, RowStatus.ABORTED, RowStatus.UNRECOVERABLE})
"""Statuses of a request's last row."""
LEAVES = np.isin(np.arange(256), [int(status) for status in (*FINISHED, RowStatus.HANDED_OFF)])
"""For each status, whether a row with that status is the last row of its request in the stream."""
_UNSCORED, _SHED = int(Scoring.NONE), int(Scoring.SHED)


class Token(NamedTuple):
    """One token of a request.

    Example:
        token = tokenbus.Token(id=42, position=0, logprob=-0.5, rank=1, alternatives=((42, -0.5),), request_id=7)
        assert token.rank == 1
    """

    id: int
    """The token id; zero is a valid id."""
    position: int
    """Position among the generated tokens, counted from 0."""
    logprob: float | None
    """Natural-log probability, at most 0, or None if the request asked for ids only."""
    rank: int | None
    """Rank by probability, counted from 1, or None if the request asked for ids only."""
    alternatives: tuple[tuple[int, float], ...]
    """Pairs of token id and logprob, most probable first."""
    request_id: int
    """Id of the token's request."""
    is_shed: bool = False
    """Whether an overloaded worker dropped the alternatives."""
    weight_version: int = 0
    """Weight version that computed the token, or 0 if unknown."""
    extras: "TokenExtras | None" = None
    """Further requested values, or None if none were requested or an overloaded worker dropped them."""


class TokenExtras(NamedTuple):
    """Values of one token beyond its logprob, if the request asked for them.

    Example:
        async with tokenbus.connect(address) as client:
            async for token in client.generate([1, 2, 3], max_tokens=4, other_logprobs=True, entropies=True):
                print(token.logprob - token.extras.other_logprob, token.extras.entropy)
    """

    other_logprob: float | None
    """Sampler's logprob if `logprob` is the model's, or the model's logprob if `logprob` is the sampler's."""
    entropy: float | None
    """Entropy of the distribution of `logprob`, in nats."""
    given_logprobs: tuple[tuple[int, float], ...]
    """Pairs of a requested token id and its logprob."""
    mask_size: int | None
    """Number of tokens that the sampler could choose from."""
    mask: tuple[int, ...] | None
    """Ids of the tokens in the sampling mask, or None for a mask larger than `mask_bound`."""


def extras_by_token(extras: Extras | None, tokens: int) -> list[TokenExtras | None]:
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
    """The columns of a batch as lists; converting all rows at once is ten times as fast as converting each row.

    The tokens and alternatives of a row are created only when the row is read, because there may be many.
    """

    def __init__(self, rows: LogprobBatch) -> None:
        counts, self._scorings = rows.token_counts.tolist(), rows.scorings.tolist()
        self._request_ids, self._positions = rows.request_ids.tolist(), rows.positions.tolist()
        self._token_ids, self._logprobs = rows.token_ids.tolist(), rows.logprobs.tolist()
        self._ranks = rows.ranks.tolist()
        self._starts = self._scored = [0, *accumulate(counts)]
        if _UNSCORED in self._scorings:
            pairs = zip(counts, self._scorings, strict=True)
            self._scored = [0, *accumulate(count * (scoring != _UNSCORED) for count, scoring in pairs)]
        self._rows = rows
        self._has_alternatives = bool(rows.alternative_token_ids.size)
        self._has_extras = rows.has_extras

    def tokens_of(self, row: int) -> list[Token]:
        request_id, position, scoring = self._request_ids[row], self._positions[row], self._scorings[row]
        version = self._rows.header.weight_version
        begin, end, scored = self._starts[row], self._starts[row + 1], self._scored[row]
        is_shed = scoring == _SHED
        alternatives: list[tuple[tuple[int, float], ...]] = []
        if self._has_alternatives:
            alternatives = _pairs(self._rows.row(row))
        extras: Sequence[TokenExtras | None] = ()
        if self._has_extras:
            extras = extras_by_token(self._rows.row(row).extras, end - begin)
        tokens = []
        for at, token_id in enumerate(self._token_ids[begin:end]):
            logprob = rank = None
            if scoring != _UNSCORED:
                logprob, rank = self._logprobs[scored + at], self._ranks[scored + at]
            pairs = alternatives[at] if alternatives else ()
            more = extras[at] if extras else None
            values = (token_id, position + at, logprob, rank, pairs, request_id, is_shed, version, more)
            tokens.append(tuple.__new__(Token, values))
        return tokens


def _pairs(row: Row) -> list[tuple[tuple[int, float], ...]]:
    tokens = zip(row.alternative_token_ids.tolist(), row.alternative_logprobs.tolist(), strict=True)
    return [tuple(zip(ids, logprobs, strict=True)) for ids, logprobs in tokens]


@dataclass(slots=True, eq=False)
class Step:
    """One step of a worker's stream, without rows that requests already received.

    Example:
        async with tokenbus.Processor() as processor:
            steps = processor.steps()  # each is a Step: step.target and step.draft are its columns
            await steps.aclose()
    """

    worker_id: str
    epoch: int
    number: int
    rows: LogprobBatch
    """Rows in their order of arrival, which is sufficient for delivery to requests."""
    draft_rows: LogprobBatch | None
    """Proposals of the draft model for some of the rows, in any order."""
    pending_ack: PendingAck = field(default_factory=PendingAck, repr=False)
    first_arrival: float = 0.0
    """Time at which the step's first part arrived, by the processor's clock."""
    is_whole: bool = True
    """Whether no row is missing; requests with missing rows have failed."""
    is_explained: bool = True
    """Whether all missing rows belong to lost items, whose requests have already failed."""
    _target: LogprobBatch | None = field(default=None, repr=False)
    _draft: LogprobBatch | None = field(default=None, repr=False)
    _token_lists: TokenLists | None = field(default=None, init=False, repr=False)

    @property
    def sequence(self) -> int:
        """Last sequence of the step's items."""
        return self.pending_ack.last_sequence

    @property
    def target(self) -> LogprobBatch:
        """Rows in the original order of their batch."""
        # The rows are sorted on first use, because sorting is most of a step's cost and delivery does not need it.
        if self._target is None:
            self._target = self.rows.in_batch_order()
        return self._target

    @property
    def draft(self) -> LogprobBatch | None:
        """Proposals of the draft model, in the original order of their batch."""
        if self._draft is None and self.draft_rows is not None:
            self._draft = self.draft_rows.in_batch_order()
        return self._draft

    @property
    def token_lists(self) -> TokenLists:
        """The columns of `rows` as lists, for iterators over tokens."""
        if self._token_lists is None:
            self._token_lists = TokenLists(self.rows)
        return self._token_lists

    def keep(self, rows: LogprobBatch, draft_rows: LogprobBatch | None) -> None:
        self.rows, self.draft_rows = rows, draft_rows
        self._target = self._draft = self._token_lists = None
