"""LocalSystem: a plan's services, started in order, watched, and stopped the other way round."""

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from tokenbus_services.cli.errors import WRONG_USE, CommandError
from tokenbus_services.cli.local.child import Child, News
from tokenbus_services.cli.local.plan import Plan

START_SECONDS = 60


class StartError(CommandError):
    """A service did not start; its own words are in the message."""


class LocalSystem:
    """Runs for as long as `async with` lasts; a service that dies is reported, and not started again."""

    def __init__(
        self, plan: Plan, lock: int, tell: Callable[[News], None], start_seconds: float = START_SECONDS
    ) -> None:
        """Take the plan, the lock that all services inherit, the callback for news, and how long a start may take."""
        self.plan = plan
        self.leave = asyncio.Event()
        """Set it, and `until_signal` ends what is done with the system."""
        self.hurry = asyncio.Event()
        """Set it, and what is still there is killed."""
        self.processor = Child(plan.processor, tell)
        self.workers = [Child(service, tell) for service in plan.workers]
        self.gateway = None if plan.gateway is None else Child(plan.gateway, tell)
        self._lock = lock
        self._start_seconds = start_seconds

    @property
    def children(self) -> list[Child]:
        """All of its services, in the order in which they are shown."""
        return [self.processor, *self.workers, *([self.gateway] if self.gateway else [])]

    @property
    def is_of_use(self) -> bool:
        """Whether a request can still be answered."""
        takers = [child for child in self.workers if not child.service.name.startswith("decode")]
        return self.processor.status is None and any(child.status is None for child in takers)

    @property
    def is_stopping(self) -> bool:
        """Whether it has begun to stop its services."""
        return any(child.is_stopping for child in self.children)

    def groups(self) -> list[int]:
        """Return the process groups of the services that run: each has one of its own."""
        return [child.pid for child in self.children if child.pid and child.status is None]

    async def __aenter__(self) -> Self:
        """Start everything; if one does not come, stop what is there and raise a StartError."""
        try:
            await self._start([self.processor])
            # Before the workers, which may take minutes: it takes its port soon after that was chosen, and a tokenizer
            # that it cannot use is reported at once. It says that it is not ready until requests find a worker.
            if self.gateway is not None:
                await self._start([self.gateway])
            # A request must not find a prefill worker whose decode workers are not there yet.
            decoding = [child for child in self.workers if child.service.name.startswith("decode")]
            await self._start(decoding)
            await self._start([child for child in self.workers if child not in decoding])
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything."""
        await self.stop()

    async def one_ended(self) -> None:
        """Wait until a service ends that still runs now."""
        ends = [asyncio.ensure_future(child.ended()) for child in self.children if child.status is None]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()

    async def stop(self) -> None:
        """Stop the gateway, then the workers, then the processor. Cancelling it kills what is left."""
        stopping = asyncio.ensure_future(self._stop())
        while not stopping.done():
            try:
                await asyncio.shield(stopping)
            except asyncio.CancelledError:
                self.hurry.set()
        stopping.result()

    async def _stop(self) -> None:
        for group in ([self.gateway] if self.gateway else [], self.workers, [self.processor]):
            await asyncio.gather(*(child.stop(self.hurry) for child in group))

    async def _start(self, children: Sequence[Child]) -> None:
        for child in children:
            try:
                await child.start(self._lock)
            except OSError as error:
                why = (error.strerror or str(error)).lower()
                raise StartError(f"{child.service.name}: no process can be started: {why}") from None
        waiting = [asyncio.ensure_future(child.ready(self._start_seconds)) for child in children]
        try:
            for done in asyncio.as_completed(waiting):
                if not await done:
                    break  # the others need not be waited for
        finally:
            for each in waiting:
                each.cancel()
        late = next((child for child in children if child.status is not None), None)
        late = late or next((child for child in children if not child.is_ready), None)
        if late is not None:
            raise _not_started(late, self._start_seconds)


def _not_started(child: Child, seconds: float) -> StartError:
    name, why = child.service.name, child.last_words.removeprefix("tokenbus: ")
    if child.status is None:
        return StartError(f"{name}: not ready after {seconds:g} s (up --start-seconds)" + (f": {why}" if why else ""))
    return StartError(
        f"{name}: ended with {child.how_it_ended} before it was ready" + (f": {why}" if why else ""),
        WRONG_USE if child.status == WRONG_USE else 1,
    )
