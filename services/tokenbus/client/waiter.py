"""Waiter: what a reader awaits. All readers that have something to take go on in one callback of the event loop."""

import asyncio
from collections.abc import Callable, Generator, Sized
from contextvars import Context
from typing import Any


class WakeUps:
    """Lets the tasks go on whose waiters have something to take, in the order in which they began to wait.

    An asyncio.Future has the loop make, queue and run a callback for each task, which is most of what a wake-up costs.
    """

    __slots__ = ("_is_due", "_loop", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[Waiter] = []
        self._is_due = False
        self._loop: asyncio.AbstractEventLoop | None = None
        """That of the tasks that wait; it may not run when they are woken, as where it cancels them at its end."""

    def add(self, waiter: "Waiter") -> None:
        """Learn that a task waits."""
        self._waiting.append(waiter)
        self._loop = asyncio.get_running_loop()

    def look(self) -> None:
        """Let those that have something to take go on in the loop's next turn."""
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
            # A task lets KeyboardInterrupt and SystemExit through: the others are to go on nevertheless.
            if rest := list(left):
                self._waiting += rest
                self.look()


class Waiter:
    """Lets one task at a time wait until there is something to take, or `wake` is called; used on one event loop.

    It is a future to its task, by the protocol that asyncio has for other libraries' futures.
    """

    __slots__ = ("_asyncio_future_blocking", "_callback", "_context", "_wake_ups", "is_woken", "items")

    def __init__(self, wake_ups: WakeUps, items: Sized = ()) -> None:
        """Take what is shared with the readers that are woken together, and what fills while the task waits.

        After adding to `items`, call `look` of the shared object: once, however many waiters have something then.
        """
        self._wake_ups = wake_ups
        self._asyncio_future_blocking = False
        self._callback: Callable[[Any], object] | None = None
        self._context: Context | None = None
        self.items = items
        self.is_woken = False
        """Whether the task goes on though there may be nothing to take."""

    @property
    def is_waiting(self) -> bool:
        """Whether a task waits and was not woken yet."""
        return self._callback is not None and not self.is_woken

    def wake(self) -> None:
        """Let the task that waits go on; does nothing while none does."""
        if self.is_waiting:
            self.is_woken = True
            self._wake_ups.look()

    def resume(self) -> None:
        """Run the task that waited until it waits again; for WakeUps."""
        callback, context = self._callback, self._context
        self._callback = self._context = None
        self.is_woken = False
        if callback is not None and context is not None:
            context.run(callback, self)

    # What asyncio.Task calls.

    get_loop = staticmethod(asyncio.get_running_loop)
    result = staticmethod(bool)
    """Raises nothing, and what it returns is not looked at: a wake-up has no result."""

    def __await__(self) -> Generator[Any, None, None]:
        self._asyncio_future_blocking = True  # how a task tells a wait from a mistake
        yield self

    def add_done_callback(self, callback: Callable[[Any], object], *, context: Context) -> None:
        """Take what lets the task go on."""
        self._callback, self._context = callback, context
        self._wake_ups.add(self)

    def cancel(self, msg: str | None = None) -> bool:  # noqa: ARG002 - the task keeps the message itself
        """Wake the task, and return False: then the task raises the CancelledError by itself."""
        self.wake()
        return False
