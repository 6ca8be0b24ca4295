"""The tokens of one request: the buffer that a client's session fills, and the iterator over the buffer."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import numpy as np

from tokenbus.client.waiter import Waiter, WakeUps
from tokenbus.client.weight_spans import WeightSpan
from tokenbus.delivery.errors import RequestFailedError
from tokenbus.delivery.step import Step, Token
from tokenbus_contracts import LogprobBatch, PromptScores, Row, RowStatus
from tokenbus_contracts.batch import FIRST_STOP_TEXT, STOP_TOKEN
from tokenbus_contracts.generated.request_pb2 import RequestError


def stop_of(batch: LogprobBatch, row: int, texts: Sequence[str]) -> int | str | None:
    """Return the stop token, or the stop text among `texts`, that ended a row's request.

    Returns None if something else ended the request, for example its length, or if the stop is unknown.
    """
    stop = batch.stop(row)
    if stop == STOP_TOKEN and batch.token_counts[row]:
        return int(batch.token_ids[batch.token_counts[: row + 1].sum(dtype=np.intp) - 1])
    text = stop - FIRST_STOP_TEXT
    return texts[text] if 0 <= text < len(texts) else None


class Turn(NamedTuple):
    """A part of a request that one worker computed; each further turn continues a lost turn.

    Example:
        turn = tokenbus.Turn(begin=12, request_id=7, reason="worker_lost")
    """

    begin: int
    """Position of the turn's first token."""
    request_id: int
    """Id of the turn at processors and workers."""
    reason: str = ""
    """Name of the error that stopped the previous turn, or empty for the first turn."""
    worker_id: str = ""
    """Id of the worker that decodes, or empty before admission."""
    weight_version: int = 0
    """Version of the worker's weights at admission."""


class RequestTokens:
    """The buffer for one request's tokens: the client's session fills and limits it, and a `Generation` reads it."""

    def __init__(self, request_id: int, position: int = 0, *, wake_ups: WakeUps | None = None) -> None:
        self.request_id = request_id
        self.turns = [Turn(position, request_id)]
        """Turns of the request; the last turn is the current turn."""
        self.position = position
        self.status: RowStatus | None = None
        self.stop: int | str | None = None
        self.error: RequestError | None = None
        self.prompt_scores: PromptScores | None = None
        self.cached_tokens: int | None = None
        self.weight_spans: tuple[WeightSpan, ...] = ()
        self.generated_tokens = 0
        """Number of generated tokens according to the error; some of these tokens may not have arrived."""
        self.waiting: deque[tuple[Step, int]] = deque()
        """Unread rows as pairs of step and row index; after appending a row, call `wake_ups.look`."""
        self._tokens: deque[Token] = deque()
        self._waiter = Waiter(wake_ups or WakeUps(), self.waiting)

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def has_ended(self) -> bool:
        return self.status is not None or self.error is not None

    # The client's session calls the following methods.

    def begin_turn(self, turn: Turn) -> None:
        """Add a turn, and forget a previous turn that has no token, unless it is the first turn."""
        while self.turns[-1].begin == turn.begin and len(self.turns) > 1:
            self.turns.pop()
        self.turns.append(turn)

    def admitted(self, worker_id: str, weight_version: int) -> None:
        self.turns[-1] = self.turns[-1]._replace(worker_id=worker_id, weight_version=weight_version)

    def put(self, step: Step, row: int) -> int:
        """Add a row of a step, and return the number of unread rows."""
        self.waiting.append((step, row))
        self.wake()
        return len(self.waiting)

    def finish(self, status: RowStatus, stop: int | str | None = None) -> None:
        self.status = status
        self.stop = stop
        self.wake()

    def fail(self, error: RequestError, generated_tokens: int = 0) -> None:
        """End the request with an error; unread rows can still be read."""
        self.error = error
        self.generated_tokens = max(generated_tokens, error.emitted_tokens)
        self.wake()

    def close(self) -> None:
        self.waiting.clear()
        self._tokens.clear()

    def wake(self) -> None:
        self._waiter.wake()

    # The consumer of the tokens calls the following methods.

    def __aiter__(self) -> "RequestTokens":
        return self

    async def __anext__(self) -> Token:
        while not self._tokens:
            if self.waiting:
                self._read_tokens()
            elif self._is_over():
                raise StopAsyncIteration
            else:
                await self._waiter
        return self._tokens.popleft()

    async def rows(self, _kept: object = None) -> AsyncGenerator[Row, None]:
        """Yield the request's tokens of each step as arrays."""
        # One generator reads directly from the waiter, because each further stack frame would cost time per row.
        while True:
            row = self._next_row()
            if row is not None:
                yield row
            elif self._is_over():
                return
            else:
                await self._waiter

    def _is_over(self) -> bool:
        """Return whether the request has ended, or raise its error; all rows must have been read before."""
        if self.error is not None:
            raise RequestFailedError(self.error, self.generated_tokens)
        return self.status is not None

    def _read_tokens(self) -> None:
        step, index = self.waiting.popleft()
        tokens = step.token_lists.tokens_of(index)
        if tokens and tokens[0].position < self.position:
            tokens = [token for token in tokens if token.position >= self.position]
        if tokens:
            self.position = tokens[-1].position + 1
            self._tokens.extend(tokens)

    def _next_row(self) -> Row | None:
        while self.waiting:
            step, index = self.waiting.popleft()
            row = step.rows.row(index)
            position, tokens = row.position, len(row.token_ids)
            skip = self.position - position
            if tokens > skip and tokens:
                self.position = position + tokens
                return step.rows.select([index]).between([skip], [tokens]).row(0) if skip > 0 else row
        return None


class Generation:
    """An async iterator over one request's tokens, which `Client.generate` returns; closing it ends the request.

    Iterate either over single tokens, or over `rows()` for the tokens of each step. Only one task may iterate. Each
    token arrives once and in order, even if the processor restarts. After the last token, the iteration ends or raises
    RequestFailedError.

    `aclose`, leaving `async with`, or dropping the last reference aborts a running request and drops unread tokens.
    Closing the client does not wait for the aborted request. After a `break`, a request continues while a variable
    refers to it, so use `async with`.

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
        self._loop = asyncio.get_running_loop()
        self._tokens = tokens
        self._discard = discard

    @property
    def request_id(self) -> int:
        """Id of the request, for `Client.abort`."""
        return self._tokens.request_id

    @property
    def position(self) -> int:
        """Position of the next token, or after an error, the position at which to resume."""
        return self._tokens.position

    @property
    def status(self) -> RowStatus | None:
        """Status of the last row, or None while the request runs or after an error."""
        return self._tokens.status

    @property
    def stop(self) -> int | str | None:
        """Stop that ended the request: the id of a stop token, or a text of `stop`.

        The stop is None while the request runs, or if the model's end token, the length, an abort or an error ended it.
        For a resumed request, only a stop token is known.
        """
        return self._tokens.stop

    @property
    def prompt_scores(self) -> PromptScores | None:
        """Logprobs of the prompt tokens as arrays, which are available before the first token.

        The value is None before the scores arrive, if no scores were requested, or for a resumed request.
        """
        return self._tokens.prompt_scores

    @property
    def cached_tokens(self) -> int | None:
        """Number of prompt tokens from the engine's cache, available before the first token.

        The number is None if the engine does not count cached tokens, or for a resumed request.
        """
        return self._tokens.cached_tokens

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Parts of the request that different workers computed, in order; usually one part."""
        return tuple(self._tokens.turns)

    @property
    def weight_spans(self) -> tuple[WeightSpan, ...]:
        """Weight versions that computed the tokens, in order, once the request has ended.

        The tuple is empty if the workers report no versions. The version of tokens before a resumed position is
        unknown.
        """
        return self._tokens.weight_spans

    @property
    def error(self) -> RequestError | None:
        """Error that ended the request (raised by iterating as RequestFailedError), or None."""
        return self._tokens.error

    @property
    def has_ended(self) -> bool:
        """Whether the last token or the error has arrived; unread tokens can still be read."""
        return self._tokens.has_ended

    def __len__(self) -> int:
        return len(self._tokens)

    def __aiter__(self) -> "Generation":
        return self

    def __anext__(self) -> Coroutine[Any, Any, Token]:
        """Return the next token; after the last token of a failed request, raises RequestFailedError."""
        return self._tokens.__anext__()

    def rows(self) -> AsyncGenerator[Row, None]:
        """Yield the request's tokens of each step as arrays; raises RequestFailedError if the request fails.

        Example:
            async with tokenbus.connect(address) as client:
                async for row in client.generate([1, 2, 3], max_tokens=8, top_logprobs=0).rows():
                    print(row.position, row.token_ids, row.logprobs)
        """
        return self._tokens.rows(self)  # the generator keeps this object alive, because dropping it ends the request

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort the request if it runs, and drop unread tokens, without waiting for the worker."""
        if not self._tokens.has_ended:
            self._discard(self._tokens.request_id)
        self._tokens.close()

    def __del__(self) -> None:
        # The garbage collector may run this in any thread, so the event loop of the client discards the request.
        if hasattr(self, "_discard") and not self._tokens.has_ended:
            with contextlib.suppress(RuntimeError):  # the client's event loop has closed
                self._loop.call_soon_threadsafe(self._discard, self._tokens.request_id)
