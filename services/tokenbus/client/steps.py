"""Stream: the iterator that `Client.steps` and `Client.watch` return, and the items of `Client.steps`."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, Self, TypeVar
from weakref import ref

import numpy as np
import numpy.typing as npt

from tokenbus.client.weight_spans import WeightSpan
from tokenbus.delivery import RequestFailedError
from tokenbus_contracts import LogprobBatch, PromptScores, RowStatus

T = TypeVar("T")


class StepRows(NamedTuple):
    """An item of `Client.steps`: the client's rows of one step, as columns.

    Each row and each token arrives once, and a request's tokens arrive in order.

    Example:
        assert tokenbus.StepRows._fields == ("target", "draft")
    """

    target: LogprobBatch
    """Accepted tokens."""
    draft: LogprobBatch | None
    """Requested proposals of the draft model for the same step, or None if there are none."""


class RequestEnd(NamedTuple):
    """An item of `Client.steps`: the end of one request, after the request's last rows.

    Example:
        end = tokenbus.RequestEnd(request_id=7, status=tokenbus.RowStatus.FINISHED_STOP, error=None)
        assert end.error is None
    """

    request_id: int
    """Id of the request."""
    status: RowStatus | None
    """Status of the last row, or None if the request ended with an error."""
    error: RequestFailedError | None
    """Error that ended the request, or None."""
    stop: int | str | None = None
    """Stop token or stop text that ended the request, as in `Generation.stop`."""
    prompt_scores: PromptScores | None = None
    """Logprobs of the prompt tokens, as in `Generation.prompt_scores`."""
    weight_spans: tuple[WeightSpan, ...] = ()
    """Weight versions that computed the tokens, as in `Generation.weight_spans`."""
    cached_tokens: int | None = None
    """Number of prompt tokens from the engine's cache, as in `Generation.cached_tokens`."""


def drafts_of(target: LogprobBatch, draft: LogprobBatch) -> LogprobBatch:
    return draft.select(np.flatnonzero(np.isin(draft.request_ids, target.request_ids)))


class StepOutput:
    """Passes the rows and ends of all requests to an optional consumer; the end of a request follows its rows."""

    def __init__(self) -> None:
        self._consume: Callable[[StepRows | RequestEnd], None] | None = None
        self._held: list[RequestEnd] | None = None
        """`RequestEnd` items that wait for the rows of their step, or None while such items are passed on at once."""

    @property
    def is_open(self) -> bool:
        return self._consume is not None

    def open(self, consume: Callable[[StepRows | RequestEnd], None]) -> None:
        """Pass rows and request ends to a function; raises RuntimeError if another function already receives them."""
        if self._consume is not None:
            raise RuntimeError("steps() is already being iterated over: close that iterator first")
        self._consume = consume

    def close(self) -> None:
        self._consume = None

    def hold_ends(self) -> None:
        self._held = []

    def release_ends(self) -> None:
        held, self._held = self._held, None
        for end in held or ():
            self.put_end(end)

    def put_end(self, end: RequestEnd) -> None:
        """Pass on the end of a request after the request's rows."""
        if self._held is not None:
            self._held.append(end)
        elif self._consume is not None:
            self._consume(end)

    def put_rows(self, target: LogprobBatch, draft: LogprobBatch | None, skips: npt.NDArray[np.intp]) -> None:
        """Pass on the rows of a step without the first `skips` tokens of each row; a skip of -1 omits the row."""
        if self._consume is None or not (skips >= 0).any():
            return
        if skips.any():
            begins = np.maximum(skips, 0)
            target = target.between(begins, target.token_counts).select(np.flatnonzero(skips >= 0))
            draft = None if draft is None or begins.any() else drafts_of(target, draft)
        self._consume(StepRows(target, draft))


class StreamQueue(Generic[T]):
    """The queue of items for one Stream, on one event loop.

    `on_close` is called once. `on_length` is called with each new length, so that the owner can limit the queue.
    """

    def __init__(self, on_close: Callable[[], None], on_length: Callable[[int], None] = lambda _: None) -> None:
        self._items: deque[T] = deque()
        self._arrived = asyncio.Event()
        self._on_close = on_close
        self._on_length = on_length
        self.is_closed = False
        self.reader: ref[Stream[T]] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        self._items.append(item)
        self._arrived.set()
        self._on_length(len(self._items))

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._items.clear()
            self._arrived.set()
            self._on_close()

    def close_if_dropped(self) -> None:
        """Close the queue if its stream was dropped but the event loop has not closed the queue yet."""
        if self.reader is not None and self.reader() is None:
            self.close()

    async def get(self) -> T:
        """Wait for the next item, and return it; raises StopAsyncIteration once the queue is closed."""
        while not self._items:
            if self.is_closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        item = self._items.popleft()
        self._on_length(len(self._items))
        return item


class Stream(Generic[T]):
    """A closable async iterator, which `Client.steps` and `Client.watch` return.

    A stream collects items from its creation until it is closed by `aclose`, by leaving `async with`, or by dropping
    the last reference to it. Only one task may iterate over a stream. Closing the stream ends the
    iteration.

    Example:
        async with tokenbus.connect(address) as client, client.steps() as steps:
            client.submit([1, 2, 3], max_tokens=4)
            first = await anext(steps)
        assert isinstance(first, tokenbus.StepRows)
    """

    __slots__ = ("__weakref__", "_loop", "_queue")

    def __init__(self, queue: StreamQueue[T]) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue = queue
        queue.reader = ref(self)

    def __len__(self) -> int:
        return len(self._queue)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Wait for the next item, and return it."""
        return await self._queue.get()

    async def aclose(self) -> None:
        """Close the stream, and drop the remaining items."""
        self._queue.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # The garbage collector may run this in any thread, so the client's event loop closes the queue.
        if hasattr(self, "_queue") and not self._queue.is_closed:
            with contextlib.suppress(RuntimeError):  # the client's event loop has closed
                self._loop.call_soon_threadsafe(self._queue.close)
