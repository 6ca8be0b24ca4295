"""One request's tokens: the buffer that a client's session fills, and the iterator over it."""

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

    None: it ended otherwise, for example at its maximum length, or this is not known.
    """
    stop = batch.stop(row)
    if stop == STOP_TOKEN and batch.token_counts[row]:
        return int(batch.token_ids[batch.token_counts[: row + 1].sum(dtype=np.intp) - 1])
    text = stop - FIRST_STOP_TEXT
    return texts[text] if 0 <= text < len(texts) else None


class Turn(NamedTuple):
    """A part of a request that one worker computed; each turn after the first continues a lost one.

    Example:
        turn = tokenbus.Turn(begin=12, request_id=7, reason="worker_lost")
    """

    begin: int
    """The position of its first token."""
    request_id: int
    """The id by which processors and workers know it."""
    reason: str = ""
    """Why the previous turn stopped, as the name of an error; empty: this is the first turn."""
    worker_id: str = ""
    """Its worker; the decode worker, if another worker did the prefill. Empty: none has admitted it yet."""
    weight_version: int = 0
    """The version of the worker's weights when it was admitted."""


class RequestTokens:
    """The buffer between a client's session, which bounds it, and one request's `Generation`."""

    def __init__(self, request_id: int, position: int = 0, *, wake_ups: WakeUps | None = None) -> None:
        self.request_id = request_id
        self.turns = [Turn(position, request_id)]
        """Its turns; the last one runs."""
        self.position = position
        self.status: RowStatus | None = None
        self.stop: int | str | None = None
        self.error: RequestError | None = None
        self.prompt_scores: PromptScores | None = None
        self.cached_tokens: int | None = None
        self.weight_spans: tuple[WeightSpan, ...] = ()
        self.generated_tokens = 0
        """Number of generated tokens according to its error; some of them may not have arrived here."""
        self.waiting: deque[tuple[Step, int]] = deque()
        """Unread rows, each as a step and the row's index; after adding to it, call `wake_ups.look`."""
        self._tokens: deque[Token] = deque()
        self._waiter = Waiter(wake_ups or WakeUps(), self.waiting)

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def has_ended(self) -> bool:
        return self.status is not None or self.error is not None

    # For the session.

    def begin_turn(self, turn: Turn) -> None:
        """Add a turn; if the previous turn is not the first and has no token, it is forgotten."""
        while self.turns[-1].begin == turn.begin and len(self.turns) > 1:
            self.turns.pop()
        self.turns.append(turn)

    def admitted(self, worker_id: str, weight_version: int) -> None:
        self.turns[-1] = self.turns[-1]._replace(worker_id=worker_id, weight_version=weight_version)

    def put(self, step: Step, row: int) -> int:
        """Add a row of a step; return how many rows wait now."""
        self.waiting.append((step, row))
        self.wake()
        return len(self.waiting)

    def finish(self, status: RowStatus, stop: int | str | None = None) -> None:
        self.status = status
        self.stop = stop
        self.wake()

    def fail(self, error: RequestError, generated_tokens: int = 0) -> None:
        """End it with an error; unread rows can still be read."""
        self.error = error
        self.generated_tokens = max(generated_tokens, error.emitted_tokens)
        self.wake()

    def close(self) -> None:
        self.waiting.clear()
        self._tokens.clear()

    def wake(self) -> None:
        self._waiter.wake()

    # For the consumer.

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
        """Yield each step's tokens of this request, as arrays."""
        # A single generator over the waiter, because every further stack frame would cost time for each row.
        while True:
            row = self._next_row()
            if row is not None:
                yield row
            elif self._is_over():
                return
            else:
                await self._waiter

    def _is_over(self) -> bool:
        """Tell whether it has ended; raises its error. Call it only when everything has been read."""
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

    Iterate over it for single tokens, or over `rows()` for the tokens of each step; only one task may do so, and only
    one of the two. Each token comes once and in order, through restarts of the processor; then the iteration ends, or
    raises RequestFailedError.

    `aclose`, leaving `async with`, or dropping the last reference ends a request that is still running: its worker
    aborts it, unread tokens are dropped, and closing the client does not wait for it. After a `break`, a request goes
    on as long as a variable refers to it, so use `async with`.

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
        """The request's id, by which `Client.abort` ends it."""
        return self._tokens.request_id

    @property
    def position(self) -> int:
        """The position of the next token; after an error, the position at which to resume."""
        return self._tokens.position

    @property
    def status(self) -> RowStatus | None:
        """The status of its last row; None while it runs, and if it ended with an error."""
        return self._tokens.status

    @property
    def stop(self) -> int | str | None:
        """The stop that ended it: the id of a stop token, or a text of `stop`.

        None while it runs, and if something else ended it: the model's own end token, the length, an abort or an error.
        For a resumed request only a stop token is known.
        """
        return self._tokens.stop

    @property
    def prompt_scores(self) -> PromptScores | None:
        """The logprobs of the prompt's tokens, as arrays, if the request asked for them.

        They are available before the first token.

        None: not yet available, not asked for, or the request was resumed.
        """
        return self._tokens.prompt_scores

    @property
    def cached_tokens(self) -> int | None:
        """The number of the prompt's tokens that the engine had in its cache; known before the first token.

        None: not known, as with an engine that does not count them, or for a resumed request.
        """
        return self._tokens.cached_tokens

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The parts of the request that different workers computed, in order; usually one."""
        return tuple(self._tokens.turns)

    @property
    def weight_spans(self) -> tuple[WeightSpan, ...]:
        """The versions of the weights that computed its tokens, in order, once it has ended.

        Empty: its workers count no versions. For tokens before a resumed position, the version is unknown.
        """
        return self._tokens.weight_spans

    @property
    def error(self) -> RequestError | None:
        """The error that ended it, which the iteration raises as RequestFailedError; None: there is none."""
        return self._tokens.error

    @property
    def has_ended(self) -> bool:
        """Whether its last token or its error has arrived; unread tokens can still be read."""
        return self._tokens.has_ended

    def __len__(self) -> int:
        return len(self._tokens)

    def __aiter__(self) -> "Generation":
        return self

    def __anext__(self) -> Coroutine[Any, Any, Token]:
        """Return the next token; raises RequestFailedError after the last token before an error."""
        return self._tokens.__anext__()

    def rows(self) -> AsyncGenerator[Row, None]:
        """Yield each step's tokens of this request, as arrays; raises RequestFailedError as iterating does.

        Example:
            async with tokenbus.connect(address) as client:
                async for row in client.generate([1, 2, 3], max_tokens=8, top_logprobs=0).rows():
                    print(row.position, row.token_ids, row.logprobs)
        """
        return self._tokens.rows(self)  # the generator keeps a reference: dropping the last one ends the request

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the request, if it runs, and drop unread tokens; it does not wait for the worker."""
        if not self._tokens.has_ended:
            self._discard(self._tokens.request_id)
        self._tokens.close()

    def __del__(self) -> None:
        # The garbage collector may run this in any thread, so the event loop of the client discards the request.
        if hasattr(self, "_discard") and not self._tokens.has_ended:
            with contextlib.suppress(RuntimeError):  # the loop has closed, and so has the client
                self._loop.call_soon_threadsafe(self._discard, self._tokens.request_id)
