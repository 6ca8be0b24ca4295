"""RequestTokens: one request's tokens, one after the other, until it ends."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple, Self

from tokenbus_contracts import Row, RowStatus, Scoring
from tokenbus_contracts.generated.request_pb2 import RequestError
from tokenbus_services.delivery.errors import RequestFailedError
from tokenbus_services.delivery.step import Step


class Token(NamedTuple):
    """One token of a request."""

    id: int
    position: int
    logprob: float | None
    """None where the request asked for ids only."""
    rank: int | None
    alternatives: tuple[tuple[int, float], ...]
    """Token ids and logprobs, the most probable first."""
    is_shed: bool
    """Whether its alternatives were dropped on the way, because a worker had no room for them."""


class RequestTokens:
    """An async iterator over one request's tokens: each once, in order, then the end or a RequestFailedError.

    Tokens wait here, bounded by whoever puts them here, until they are taken. `rows` gives a step's tokens at
    a time instead, as arrays. Only one of the two may be used, by one task.
    """

    def __init__(self, key: int, position: int = 0) -> None:
        """Begin with the token that has a position."""
        self.key = key
        self.position = position
        self.status: RowStatus | None = None
        """The status of its last row, once it has ended without an error."""
        self.error: RequestError | None = None
        self.generated_tokens = 0
        """How far its error says that it came, which may be further than what has come here."""
        self.on_waiting: Callable[[RequestTokens], None] = _nobody
        """Told when its consumer waits."""
        self.waiting: deque[tuple[Step, int]] = deque()
        """The rows that were not taken yet; who adds some wakes the consumer."""
        self._tokens: deque[Token] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        """Return how many rows wait to be taken."""
        return len(self.waiting)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return self.status is not None or self.error is not None

    @property
    def is_awaited(self) -> bool:
        """Whether its consumer waits for something to come."""
        return self._waiter is not None

    # For who delivers.

    def put(self, step: Step, row: int) -> int:
        """Add a row of a step, which the step's hold counts; return how many rows wait now."""
        self.waiting.append((step, row))
        self.wake()
        return len(self.waiting)

    def finish(self, status: RowStatus) -> None:
        """Say that the last row was the last."""
        self.status = status
        self.wake()

    def fail(self, error: RequestError, generated_tokens: int = 0) -> None:
        """Say that nothing more comes, and why; what has come can still be taken.

        Where the error says how many tokens came here, how far the request came at its worker may be said beside it.
        """
        self.error = error
        self.generated_tokens = max(generated_tokens, error.emitted_tokens)
        self.wake()

    def give_up(self) -> deque[tuple[Step, int]]:
        """Return the rows that were not taken, for somebody else; their holds go with them."""
        rows = self.waiting.copy()
        self.waiting.clear()
        return rows

    def oldest(self) -> Step | None:
        """Return the step of the row that has waited the longest."""
        return self.waiting[0][0] if self.waiting else None

    def wake(self) -> None:
        """Let the consumer look, if it waits."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # For who consumes.

    def __aiter__(self) -> Self:
        """Return itself."""
        return self

    async def __anext__(self) -> Token:
        """Return the next token."""
        while not self._tokens:
            found = await self._next_row()
            if found is None:
                raise StopAsyncIteration
            self._tokens.extend(_tokens_of(found))
        return self._tokens.popleft()

    async def rows(self) -> AsyncIterator[Row]:
        """Yield each step's tokens of this request, as arrays."""
        while (row := await self._next_row()) is not None:
            yield row

    async def _next_row(self) -> Row | None:
        while True:
            while self.waiting:
                row = self._taken()
                if row is not None:
                    return row
            if self.error is not None:
                raise RequestFailedError(self.error, self.generated_tokens)
            if self.status is not None:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            self.on_waiting(self)
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _taken(self) -> Row | None:
        """Take the next row; None if it has no token that was not taken before."""
        step, place = self.waiting.popleft()
        row = step.rows.row(place)
        step.pending_ack.release()
        count = row.token_ids.size
        skip = min(max(self.position - row.position, 0), count)
        if skip == count:
            return None
        self.position = row.position + count
        return _without_first(row, skip) if skip else row


def _without_first(row: Row, skip: int) -> Row:
    scored = skip if row.scoring is not Scoring.NONE else 0
    return row._replace(
        position=row.position + skip,
        token_ids=row.token_ids[skip:],
        logprobs=row.logprobs[scored:],
        ranks=row.ranks[scored:],
        alternative_token_ids=row.alternative_token_ids[skip:],
        alternative_logprobs=row.alternative_logprobs[skip:],
    )


def _tokens_of(row: Row) -> list[Token]:
    count = row.token_ids.size
    scored = row.scoring is not Scoring.NONE
    logprobs = row.logprobs.tolist() if scored else [None] * count
    ranks = row.ranks.tolist() if scored else [None] * count
    pairs = zip(row.alternative_token_ids.tolist(), row.alternative_logprobs.tolist(), strict=True)
    alternatives = [tuple(zip(ids, values, strict=True)) for ids, values in pairs]
    shed = row.scoring is Scoring.SHED
    places = range(row.position, row.position + count)
    return [
        Token(*token, shed) for token in zip(row.token_ids.tolist(), places, logprobs, ranks, alternatives, strict=True)
    ]


def _nobody(_tokens: RequestTokens) -> None:
    """Nobody wants to know."""
