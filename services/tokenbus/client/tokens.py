"""One request's tokens: the buffer that a deliverer fills, and the iterator that a consumer takes them from."""

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
from tokenbus_contracts import LogprobBatch, PromptScores, Row, RowStatus, Scoring
from tokenbus_contracts.batch import FIRST_STOP_TEXT, STOP_TOKEN
from tokenbus_contracts.generated.request_pb2 import RequestError


def stop_of(batch: LogprobBatch, row: int, texts: Sequence[str]) -> int | str | None:
    """Return the stop token or the stop text that ended a row's request, whose stop texts are given.

    None where neither did, as where the model's own end token or the length ended it, and where it is not known.
    """
    stop = batch.stop(row)
    if stop == STOP_TOKEN and batch.token_counts[row]:
        return int(batch.token_ids[batch.token_counts[: row + 1].sum(dtype=np.intp) - 1])
    text = stop - FIRST_STOP_TEXT
    return texts[text] if 0 <= text < len(texts) else None


class Turn(NamedTuple):
    """A part of a request that one worker computed; after the first, the client continued what was lost.

    Example:
        turn = tokenbus.Turn(begin=12, request_id=7, reason="worker_lost")
    """

    begin: int
    """The position of its first token."""
    request_id: int
    """The id under which processors and workers know it."""
    reason: str = ""
    """Why the turn before it stopped, as an error's name; empty: this is the first one."""
    worker_id: str = ""
    """Its worker; of a prefill and a decode worker the latter. Empty: none has admitted it yet."""
    weight_version: int = 0
    """The version of the worker's weights when it was admitted."""


class RequestTokens:
    """The buffer of one request's rows that were not taken yet, for `Generation`; who adds them bounds their number."""

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
        """How many tokens its error says were generated, which may be more than came here."""
        self.waiting: deque[tuple[Step, int]] = deque()
        """The rows that were not taken yet, as a step and a place in it; after adding to it, call `wake_ups.look`."""
        self._tokens: deque[Token] = deque()
        self._waiter = Waiter(wake_ups or WakeUps(), self.waiting)

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return self.status is not None or self.error is not None

    @property
    def turn_id(self) -> int:
        """The request id of its current turn."""
        return self.turns[-1].request_id

    # For the deliverer.

    def begin_turn(self, turn: Turn) -> None:
        """Add a turn; one that gave no token is forgotten."""
        while self.turns and self.turns[-1].begin == turn.begin and len(self.turns) > 1:
            self.turns.pop()
        self.turns.append(turn)

    def admitted(self, worker_id: str, weight_version: int) -> None:
        """Learn which worker has the turn that runs."""
        self.turns[-1] = self.turns[-1]._replace(worker_id=worker_id, weight_version=weight_version)

    def put(self, step: Step, row: int) -> int:
        """Add a row of a step; return how many rows wait now."""
        self.waiting.append((step, row))
        self.wake()
        return len(self.waiting)

    def finish(self, status: RowStatus, stop: int | str | None = None) -> None:
        """End it without an error: the last row has come, perhaps with a stop of the request's own."""
        self.status = status
        self.stop = stop
        self.wake()

    def fail(self, error: RequestError, generated_tokens: int = 0) -> None:
        """End it with an error; rows that wait can still be taken."""
        self.error = error
        self.generated_tokens = max(generated_tokens, error.emitted_tokens)
        self.wake()

    def close(self) -> None:
        """Drop what was not taken."""
        self.waiting.clear()
        self._tokens.clear()

    def wake(self) -> None:
        """Let a waiting consumer look again."""
        self._waiter.wake()

    # For the consumer.

    def __aiter__(self) -> "RequestTokens":
        return self

    async def __anext__(self) -> Token:
        while not self._tokens:
            if self.waiting:
                self._take_tokens()
            elif self._is_over():
                raise StopAsyncIteration
            else:
                await self._waiter
        return self._tokens.popleft()

    async def rows(self, _kept: object = None) -> AsyncGenerator[Row, None]:
        """Yield each step's tokens of this request, as arrays."""
        # One generator and nothing beneath it but the waiter: every frame more is paid for by each row.
        while True:
            row = self._taken()
            if row is not None:
                yield row
            elif self._is_over():
                return
            else:
                await self._waiter

    def _is_over(self) -> bool:
        """Tell whether nothing more will come, once what waited was taken; raises the error that it ended with."""
        if self.error is not None:
            raise RequestFailedError(self.error, self.generated_tokens)
        return self.status is not None

    def _take_tokens(self) -> None:
        step, place = self.waiting.popleft()
        tokens = step.token_lists.tokens_of(place)
        if tokens and tokens[0].position < self.position:
            tokens = [token for token in tokens if token.position >= self.position]
        if tokens:
            self.position = tokens[-1].position + 1
            self._tokens.extend(tokens)

    def _taken(self) -> Row | None:
        while self.waiting:
            step, place = self.waiting.popleft()
            row = step.rows.row(place)
            position, tokens = row.position, len(row.token_ids)
            skip = self.position - position
            if tokens > skip and tokens:
                self.position = position + tokens
                return _without_first(row, skip) if skip > 0 else row
        return None


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
        self._loop = asyncio.get_running_loop()
        self._tokens = tokens
        self._discard = discard

    @property
    def request_id(self) -> int:
        """The request's id, by which `Client.abort` ends it."""
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
    def prompt_scores(self) -> PromptScores | None:
        """What the model says of the prompt's tokens, as arrays: before the first token, where it was asked for.

        None: not yet, not asked for, or a request that was resumed.
        """
        return self._tokens.prompt_scores

    @property
    def cached_tokens(self) -> int | None:
        """How many of the prompt's tokens the engine had in its cache: before the first token.

        None: not known, as with an engine that does not count them, or of a request that was resumed.
        """
        return self._tokens.cached_tokens

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The parts of the request that different workers computed, in order; mostly one."""
        return tuple(self._tokens.turns)

    @property
    def weight_spans(self) -> tuple[WeightSpan, ...]:
        """Which versions of the weights computed its tokens, in order, once it has ended; empty: no worker counts them.

        The version of tokens from before the request was resumed is not known.
        """
        return self._tokens.weight_spans

    @property
    def error(self) -> RequestError | None:
        """The error that it ended with, which iterating raises as RequestFailedError; None: there is none."""
        return self._tokens.error

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come from its worker; what has come can still be taken."""
        return self._tokens.has_ended

    def __len__(self) -> int:
        return len(self._tokens)

    def __aiter__(self) -> "Generation":
        return self

    def __anext__(self) -> Coroutine[Any, Any, Token]:
        """Return the next token; raises RequestFailedError once what came before the error was taken."""
        return self._tokens.__anext__()

    def rows(self) -> AsyncGenerator[Row, None]:
        """Yield each step's tokens of this request, as arrays; raises RequestFailedError as iterating does.

        Example:
            async with tokenbus.connect(address) as client:
                async for row in client.generate([1, 2, 3], max_tokens=8, top_logprobs=0).rows():
                    print(row.position, row.token_ids, row.logprobs)
        """
        return self._tokens.rows(self)  # which keeps this object: dropping it would end the request

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the request, if it runs, and drop the tokens that were not taken; it does not wait for the worker."""
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
        extras=None if row.extras is None else row.extras.after(skip),
    )
