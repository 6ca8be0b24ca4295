"""Stream: what `Client.steps` returns, an iterator over whole steps from a bounded queue; and its items."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, Self, TypeVar

from tokenbus.client.weight_spans import WeightSpan
from tokenbus.delivery import RequestFailedError
from tokenbus_contracts import LogprobBatch, PromptScores, RowStatus

T = TypeVar("T")


class StepRows(NamedTuple):
    """A client's rows of one step, as columns: an item of `Client.steps`.

    Each row and each token comes once, in the order in which its request had it. Compare `isinstance(item, StepRows)`,
    or match as in the example of `Client.steps`.

    Example:
        assert tokenbus.StepRows._fields == ("target", "draft")
    """

    target: LogprobBatch
    """The tokens that were accepted."""
    draft: LogprobBatch | None
    """What the draft model proposed for the same step, where a request asked for that; else None."""


class RequestEnd(NamedTuple):
    """How one request ended: an item of `Client.steps`, after the request's last rows.

    Example:
        end = tokenbus.RequestEnd(request_id=7, status=tokenbus.RowStatus.FINISHED_STOP, error=None)
        assert end.error is None
    """

    request_id: int
    """The request."""
    status: RowStatus | None
    """The status of its last row; None: it ended with an error."""
    error: RequestFailedError | None
    """The error that it ended with, and how many tokens came before; None: it has a status."""
    stop: int | str | None = None
    """The stop token or the stop text that ended it, as `Generation.stop`."""
    prompt_scores: PromptScores | None = None
    """What the model says of its prompt's tokens, as `Generation.prompt_scores`."""
    weight_spans: tuple[WeightSpan, ...] = ()
    """Which versions of the weights computed its tokens, as `Generation.weight_spans`."""
    cached_tokens: int | None = None
    """How many of its prompt's tokens the engine had in its cache, as `Generation.cached_tokens`."""


class StreamQueue(Generic[T]):
    """Items in order, on one event loop. `on_length` hears each new length, and bounds it."""

    def __init__(self, on_length: Callable[[int], None] | None = None) -> None:
        self._items: deque[T] = deque()
        self._arrived = asyncio.Event()
        self._on_length = on_length
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Add an item behind the others."""
        self._items.append(item)
        self._arrived.set()
        if self._on_length is not None:
            self._on_length(len(self._items))

    def close(self) -> None:
        """Drop what waits, and let a consumer that waits end."""
        self.is_closed = True
        self._items.clear()
        self._arrived.set()

    async def get(self) -> T:
        """Return the next item; wait until there is one. Raises StopAsyncIteration once it is closed."""
        while not self._items:
            if self.is_closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        item = self._items.popleft()
        if self._on_length is not None:
            self._on_length(len(self._items))
        return item


class Stream(Generic[T]):
    """What `Client.steps` and `Client.watch` return: an async iterator that can be closed.

    It takes items from the moment it is made until it is closed: by `aclose`, by leaving `async with`, or by dropping
    the last reference to it. One task iterates over it. Once it is closed, iterating ends.

    Example:
        async with tokenbus.connect(address) as client, client.steps() as steps:
            client.submit([1, 2, 3], max_tokens=4)
            first = await anext(steps)
        assert isinstance(first, tokenbus.StepRows)
    """

    __slots__ = ("__weakref__", "_loop", "_queue", "_unregister")

    def __init__(self, queue: StreamQueue[T], unregister: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue = queue
        self._unregister = unregister

    def __len__(self) -> int:
        return len(self._queue)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Return the next item; wait until there is one."""
        return await self._queue.get()

    async def aclose(self) -> None:
        """Close it, and drop what was not taken."""
        if not self._queue.is_closed:
            self._queue.close()
            self._unregister()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # On the client's event loop, as the garbage collector may run this in any thread.
        if hasattr(self, "_unregister") and not self._queue.is_closed:
            with contextlib.suppress(RuntimeError):  # the loop has closed, and the client with it
                self._loop.call_soon_threadsafe(self._unregister)
