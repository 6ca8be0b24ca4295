"""Waiter: an awaitable for readers; one callback of the event loop resumes all readers that have items."""

import asyncio
from collections.abc import Callable, Generator, Sized
from contextvars import Context
from typing import Any


class WakeUps:
    """Resumes the tasks whose waiters have items, in the order in which the tasks began to wait.

    With asyncio.Future, the loop would create, queue and run one callback per task, which is most of the cost of a
    wake-up.
    """

    __slots__ = ("_is_due", "_loop", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[Waiter] = []
        self._is_due = False
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop of the waiting tasks; stored because asyncio cancels the last tasks after the loop has stopped."""

    def add(self, waiter: "Waiter") -> None:
        self._waiting.append(waiter)
        self._loop = asyncio.get_running_loop()

    def look(self) -> None:
        """Resume the tasks whose waiters have items, in the loop's next iteration."""
        if self._waiting and not self._is_due and self._loop is not None:
            self._loop.call_soon(self._run)
            self._is_due = True

    def _run(self) -> None:
        waiting, self._waiting, self._is_due = self._waiting, [], False
        left = iter(waiting)
        try:
            for waiter in left:
                if waiter.items or waiter.is_woken:
                    waiter.resume()
                else:
                    self._waiting.append(waiter)
        finally:
            # A task may raise KeyboardInterrupt or SystemExit, but the remaining tasks must still be resumed.
            if rest := list(left):
                self._waiting += rest
                self.look()


class Waiter:
    """Lets one task at a time wait for items or for `wake`, on one event loop.

    A task awaits a Waiter like a future, by asyncio's protocol for futures of other libraries.
    """

    __slots__ = ("_asyncio_future_blocking", "_callback", "_context", "_wake_ups", "is_woken", "items")

    def __init__(self, wake_ups: WakeUps, items: Sized = ()) -> None:
        """Create a waiter for `items`; after adding items, the owner must call `look` of the shared `wake_ups` once."""
        self._wake_ups = wake_ups
        self._asyncio_future_blocking = False
        self._callback: Callable[[Any], object] | None = None
        self._context: Context | None = None
        self.items = items
        self.is_woken = False
        """Whether the task is resumed even without items."""

    @property
    def is_waiting(self) -> bool:
        return self._callback is not None and not self.is_woken

    def wake(self) -> None:
        if self.is_waiting:
            self.is_woken = True
            self._wake_ups.look()

    def resume(self) -> None:
        """Run the task until it waits again; only WakeUps calls this."""
        callback, context = self._callback, self._context
        self._callback = self._context = None
        self.is_woken = False
        if callback is not None and context is not None:
            context.run(callback, self)

    # asyncio.Task calls the following methods.

    get_loop = staticmethod(asyncio.get_running_loop)
    result = staticmethod(bool)
    """Tasks call `result` only to raise the future's error, and a Waiter has no error."""

    def __await__(self) -> Generator[Any, None, None]:
        self._asyncio_future_blocking = True  # this tells asyncio that the task awaits a future
        yield self

    def add_done_callback(self, callback: Callable[[Any], object], *, context: Context) -> None:
        self._callback, self._context = callback, context
        self._wake_ups.add(self)

    def cancel(self, msg: str | None = None) -> bool:  # noqa: ARG002 - the task keeps the message itself
        """Wake the task, and return False so that the task itself raises CancelledError."""
        self.wake()
        return False
