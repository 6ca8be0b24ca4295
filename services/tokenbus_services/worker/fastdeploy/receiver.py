"""Receiver: the get side. A processor in a thread of its own, and the messages of its steps one after the other."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any, TypeVar

from tokenbus_services.delivery import Step
from tokenbus_services.settings import Settings
from tokenbus_services.worker.fastdeploy.background import Background
from tokenbus_services.worker.fastdeploy.message import Message
from tokenbus_services.worker.fastdeploy.received import messages_of

T = TypeVar("T")


class Receiver:
    """Hands out messages in order; a step is acknowledged when its last message was taken."""

    def __init__(self, settings: Settings) -> None:
        """Listen, in a thread of its own."""
        self._settings = settings
        self._arrived = threading.Condition()
        self._messages: deque[Message] = deque()
        self._wanted: asyncio.Event | None = None
        self._is_closed = False
        self._background: Background[Any] = Background("tokenbus-fastdeploy-get", self._take_steps)

    @property
    def processor(self) -> Any:  # noqa: ANN401 - a TokenProcessor, which is not imported before it is needed
        """What it takes steps from."""
        return self._background.service

    def peek(self, *, wait: bool) -> Message | None:
        """Return the next message, or None if there is none just now and it is not waited for."""
        with self._arrived:
            while not self._messages:
                if self._is_closed:
                    raise RuntimeError("the get side has ended") from self._background.error
                if not wait:
                    return None
                self._arrived.wait()
            return self._messages[0]

    def pop(self) -> None:
        """Learn that the message that was looked at is taken."""
        with self._arrived:
            self._messages.popleft()
            if not self._messages and self._wanted is not None:
                self._background.call(self._wanted.set)

    def close(self) -> None:
        """End; steps that were not taken are their worker's again."""
        self._background.close()

    async def _take_steps(self, started: "Future[Any]", stopping: asyncio.Event) -> None:
        # Imported here, as a process that only saves needs no processor.
        from tokenbus_services.processor import TokenProcessor  # noqa: PLC0415

        self._wanted = asyncio.Event()
        processor = TokenProcessor(self._settings)
        steps = processor.steps()
        stop = asyncio.create_task(_set(stopping))
        following = asyncio.create_task(_next(steps))
        await asyncio.sleep(0)  # it waits before anything can come: steps that nobody waited for would be nobody's
        try:
            async with processor:
                started.set_result(processor)
                while await _first_of(following, stop) is following:
                    if not await self._hand_over(following.result(), stop):
                        break
                    following = asyncio.create_task(_next(steps))
        finally:
            following.cancel()
            stop.cancel()
            await asyncio.gather(following, stop, return_exceptions=True)
            await steps.aclose()
            with self._arrived:
                self._is_closed = True
                self._arrived.notify_all()

    async def _hand_over(self, step: Step, stop: "asyncio.Task[None]") -> bool:
        """Give a step's messages to who gets them, and wait until they are taken; False: it is time to end."""
        messages = messages_of(step)
        if not messages or self._wanted is None:
            return True
        self._wanted.clear()
        with self._arrived:
            self._messages.extend(messages)
            self._arrived.notify_all()
        taken = asyncio.create_task(_set(self._wanted))
        is_taken = await _first_of(taken, stop) is taken
        taken.cancel()
        return is_taken


async def _set(event: asyncio.Event) -> None:
    await event.wait()


async def _next(steps: AsyncIterator[Step]) -> Step:
    return await anext(steps)


async def _first_of(wanted: "asyncio.Task[T]", stop: "asyncio.Task[None]") -> "asyncio.Task[T] | asyncio.Task[None]":
    """Wait for either, and return the one that is done; if both are, it is time to stop."""
    await asyncio.wait([wanted, stop], return_when=asyncio.FIRST_COMPLETED)
    return stop if stop.done() else wanted
