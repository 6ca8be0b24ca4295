"""One request's tokens: the buffer that a deliverer fills, and the iterator that a consumer takes them from."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from itertools import repeat
from typing import Any, NamedTuple, Self

import numpy as np

from tokenbus_contracts import LogprobBatch, Row, RowStatus, Scoring
from tokenbus_contracts.batch import FIRST_STOP_TEXT, STOP_TOKEN
from tokenbus_contracts.generated.request_pb2 import RequestError
from tokenbus_services.delivery.errors import RequestFailedError
from tokenbus_services.delivery.step import Step


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


def stop_of(batch: LogprobBatch, row: int, texts: Sequence[str]) -> int | str | None:
    """Return the stop token or the stop text that ended a row's request, whose stop texts are given.

    None where neither did, as where the model's own end token or the length ended it, and where it is not known.
    """
    stop = batch.stop(row)
    if stop == STOP_TOKEN and batch.token_counts[row]:
        return int(batch.token_ids[batch.token_counts[: row + 1].sum(dtype=np.intp) - 1])
    text = stop - FIRST_STOP_TEXT
    return texts[text] if 0 <= text < len(texts) else None


class RequestTokens:
    """The buffer of one request's rows that were not taken yet, and an async iterator over its tokens.

    Iterating gives each token once and in order, then ends or raises RequestFailedError; `rows` gives a step's tokens
    at a time, as arrays. One task may use one of the two. The deliverer bounds how many rows wait.
    """

    def __init__(
        self, request_id: int, position: int = 0, *, on_waiting: "Callable[[RequestTokens], None] | None" = None
    ) -> None:
        """Begin with the token at a position; `on_waiting` is called each time the consumer begins to wait."""
        self.request_id = request_id
        self.position = position
        self.status: RowStatus | None = None
        """The status of its last row, once it has ended without an error."""
        self.stop: int | str | None = None
        """The stop token or the stop text that ended it, as far as the deliverer knows."""
        self.error: RequestError | None = None
        """The error it ended with."""
        self.generated_tokens = 0
        """How many tokens its error says were generated, which may be more than came here."""
        self.waiting: deque[tuple[Step, int]] = deque()
        """The rows that were not taken yet, as a step and a place in it; after adding to it, call `wake`."""
        self._on_waiting = on_waiting
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

    # For the deliverer.

    def put(self, step: Step, row: int) -> int:
        """Add a row of a step, which the step's pending ack counts; return how many rows wait now."""
        self.waiting.append((step, row))
        self.wake()
        return len(self.waiting)

    def finish(self, status: RowStatus, stop: int | str | None = None) -> None:
        """End it without an error: the last row has come, perhaps with a stop of the request's own."""
        self.status = status
        self.stop = stop
        self.wake()

    def fail(self, error: RequestError, generated_tokens: int = 0) -> None:
        """End it with an error; rows that wait can still be taken.

        `generated_tokens` counts what the worker generated, where that is more than the error's `emitted_tokens`.
        """
        self.error = error
        self.generated_tokens = max(generated_tokens, error.emitted_tokens)
        self.wake()

    def give_up(self) -> deque[tuple[Step, int]]:
        """Return the rows that were not taken, and forget them; the caller releases their pending acks."""
        rows = self.waiting.copy()
        self.waiting.clear()
        return rows

    def close(self) -> None:
        """Drop what was not taken."""
        for step, _ in self.give_up():
            step.pending_ack.release()
        self._tokens.clear()

    def oldest(self) -> Step | None:
        """Return the step of the row that has waited the longest."""
        return self.waiting[0][0] if self.waiting else None

    def wake(self) -> None:
        """Let a waiting consumer look again."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # For the consumer.

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
            if self._on_waiting is not None:
                self._on_waiting(self)
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


class Generation:
    """What `Client.generate` returns: an async iterator over one request's tokens that ends its request when closed.

    Iterate over it for tokens, or over `rows()` for a step's tokens at a time; one task, one of the two. Each token
    comes once and in order, through restarts of the processor; then the iteration ends, or raises RequestFailedError.

    `aclose`, leaving `async with`, or dropping the last reference ends a request that is still running: its worker
    aborts it, tokens that were not taken are dropped, and closing the client does not wait for it. A request that is
    only left by `break` while a variable still refers to it goes on: use `async with`.

    Example:
        async with tokenbus.connect(address) as client:
            async with client.generate([1, 2, 3], max_tokens=100) as generation:
                async for token in generation:
                    if token.position == 3:
                        break
        assert generation.has_ended
    """

    __slots__ = ("_discard", "_loop", "_tokens")

    def __init__(self, tokens: RequestTokens, discard: Callable[[int], None]) -> None:
        """Take the buffer, and what ends the request by its id; made on the event loop that calls `discard`."""
        self._loop = asyncio.get_running_loop()
        self._tokens = tokens
        self._discard = discard

    @property
    def request_id(self) -> int:
        """The request's id, by which `Client.resume` can take it up again and `Client.abort` ends it."""
        return self._tokens.request_id

    @property
    def position(self) -> int:
        """The position of the next token: after an error, where to resume."""
        return self._tokens.position

    @property
    def status(self) -> RowStatus | None:
        """How it ended, as the status of its last row; None while it runs, and if it ended with an error."""
        return self._tokens.status

    @property
    def stop(self) -> int | str | None:
        """Which of its own stops ended it: the id of a stop token, or a text of `stop`.

        None while it runs, and where neither did: the model's own end token or the length, an abort or an error. Of a
        request that was resumed only a stop token is known.
        """
        return self._tokens.stop

    @property
    def error(self) -> RequestError | None:
        """The error that it ended with, which iterating raises as RequestFailedError; None: there is none."""
        return self._tokens.error

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come from its worker; what has come can still be taken."""
        return self._tokens.has_ended

    def __len__(self) -> int:
        """Return how many rows wait to be taken."""
        return len(self._tokens)

    def __aiter__(self) -> Self:
        """Return itself."""
        return self

    def __anext__(self) -> Coroutine[Any, Any, Token]:
        """Return the next token; raises RequestFailedError once what came before the error was taken."""
        return self._tokens.__anext__()

    async def rows(self) -> AsyncIterator[Row]:
        """Yield each step's tokens of this request, as arrays; raises RequestFailedError as iterating does.

        Example:
            async with tokenbus.connect(address) as client:
                async for row in client.generate([1, 2, 3], max_tokens=8, top_logprobs=0).rows():
                    print(row.position, row.token_ids, row.logprobs)
        """
        while (row := await self._tokens._next_row()) is not None:  # noqa: SLF001 - its own buffer
            yield row

    async def aclose(self) -> None:
        """End the request, if it runs, and drop the tokens that were not taken; it does not wait for the worker."""
        self._close()

    async def __aenter__(self) -> Self:
        """Return itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        self._close()

    def _close(self) -> None:
        if not self._tokens.has_ended:
            self._discard(self._tokens.request_id)
        self._tokens.close()

    def __del__(self) -> None:
        # On the client's event loop, as the garbage collector may run this in any thread.
        if hasattr(self, "_discard") and not self._tokens.has_ended:
            with contextlib.suppress(RuntimeError):  # the loop has closed, and the client with it
                self._loop.call_soon_threadsafe(self._discard, self._tokens.request_id)


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
    places = range(row.position, row.position + count)
    same = repeat(row.key, count), repeat(row.scoring is Scoring.SHED, count)
    columns = zip(row.token_ids.tolist(), places, logprobs, ranks, alternatives, *same, strict=True)
    return list(map(Token._make, columns))
