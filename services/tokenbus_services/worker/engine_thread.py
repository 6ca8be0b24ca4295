"""EngineThread: the one thread on which an engine is made, stepped and closed."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from tokenbus_services.worker.engine import Engine

T = TypeVar("T")


class EngineThread:
    """Makes an engine, runs its loop, and closes it when `with` ends, all on one thread.

    What an engine takes at its start often belongs to a thread: a CUDA device, OpenMP's threads, their cores. The
    thread is a daemon, so that a process that is interrupted while the engine is made need not wait for it.
    """

    def __init__(self, engine: Engine | Callable[[], Engine]) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._closed: Future[None] | None = None
        self.made: Future[Engine] = self.run(engine if callable(engine) else lambda: engine)
        """The engine, or what the function raised."""

    def __enter__(self) -> "EngineThread":
        threading.Thread(target=self._serve, name="tokenbus-engine", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, call: Callable[[], T]) -> "Future[T]":
        """Call a function on the thread, once the calls before it have returned."""
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()
        self._calls.put((call, done))
        return done

    def close(self) -> "Future[None]":
        """Have the engine closed, once it is made and its loop has returned."""
        if self._closed is None:
            self._closed = self.run(self._close)
            self._calls.put(None)
        return self._closed

    def _close(self) -> None:
        if self.made.exception() is None:
            self.made.result().close()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            function, done = call
            try:
                done.set_result(function())
            except BaseException as error:  # noqa: BLE001 - who waits for the call gets it
                done.set_exception(error)
