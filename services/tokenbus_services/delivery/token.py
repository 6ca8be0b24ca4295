"""Token: one token of a request, and how the tokens of a step's rows are made."""

from itertools import accumulate
from typing import NamedTuple

from tokenbus_contracts import LogprobBatch, Row, Scoring

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


class TokenLists:
    """What a batch's tokens are made of, as lists: for all rows at once that costs a tenth of what it costs for each.

    The tokens themselves are made of a row when it is taken, and the alternatives are read then: there may be many.
    """

    __slots__ = (
        "_has_alternatives",
        "_keys",
        "_logprobs",
        "_positions",
        "_ranks",
        "_rows",
        "_scored",
        "_scorings",
        "_starts",
        "_token_ids",
    )

    def __init__(self, rows: LogprobBatch) -> None:
        counts, self._scorings = rows.token_counts.tolist(), rows.scorings.tolist()
        self._keys, self._positions = rows.request_keys.tolist(), rows.positions.tolist()
        self._token_ids, self._logprobs, self._ranks = (
            rows.token_ids.tolist(),
            rows.logprobs.tolist(),
            rows.ranks.tolist(),
        )
        self._starts = self._scored = [0, *accumulate(counts)]
        if _UNSCORED in self._scorings:
            pairs = zip(counts, self._scorings, strict=True)
            self._scored = [0, *accumulate(count * (scoring != _UNSCORED) for count, scoring in pairs)]
        self._rows = rows
        self._has_alternatives = bool(rows.alternative_token_ids.size)

    def tokens_of(self, place: int) -> list[Token]:
        """Return the tokens of a row, by its place in the columns."""
        key, position, scoring = self._keys[place], self._positions[place], self._scorings[place]
        begin, end, scored = self._starts[place], self._starts[place + 1], self._scored[place]
        is_shed = scoring == _SHED
        alternatives: list[tuple[tuple[int, float], ...]] = []
        if self._has_alternatives:
            alternatives = _pairs(self._rows.row(place))
        tokens = []
        for at, token_id in enumerate(self._token_ids[begin:end]):
            logprob = rank = None
            if scoring != _UNSCORED:
                logprob, rank = self._logprobs[scored + at], self._ranks[scored + at]
            pairs = alternatives[at] if alternatives else ()
            tokens.append(tuple.__new__(Token, (token_id, position + at, logprob, rank, pairs, key, is_shed)))
        return tokens


def _pairs(row: Row) -> list[tuple[tuple[int, float], ...]]:
    tokens = zip(row.alternative_token_ids.tolist(), row.alternative_logprobs.tolist(), strict=True)
    return [tuple(zip(ids, logprobs, strict=True)) for ids, logprobs in tokens]
