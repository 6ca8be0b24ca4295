"""Background: an event loop in a thread of its own, for a service that the engine's own threads use."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from tokenbus_services.logs import logger

S = TypeVar("S")
_log = logger("worker")
Run = Callable[[Future[S], asyncio.Event], Coroutine[Any, Any, None]]


class Background(Generic[S]):
    """Runs a service until it is closed. What runs tells its service through the future, and ends at the event."""

    def __init__(self, name: str, run: Run[S]) -> None:
        """Start, and return when the service is there; what went wrong in starting it is raised here."""
        self._run = run
        self._process = os.getpid()
        self._started: Future[S] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self.error: BaseException | None = None
        """What ended it, if it was not closed."""
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        try:
            self.service = self._started.result()
        except BaseException:
            self._thread.join()
            raise

    def call(self, function: Callable[[], object]) -> None:
        """Have the loop call a function; nothing happens if it has ended."""
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop has closed in the meantime
            return

    def close(self) -> None:
        """End the service, and wait for that; in a process that was forked off it does not run."""
        if self._process != os.getpid():
            return
        if self._stopping is not None:
            self.call(self._stopping.set)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to who uses the service
            self.error = error
            if not self._started.done():
                self._started.set_exception(error)
            else:
                _log.exception("the service's thread ended")
        finally:
            self._loop = None

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        await self._run(self._started, self._stopping)
