"""EngineThread: the one thread on which an engine is made, stepped and closed."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType

from tokenbus_services.worker.engine import Engine


class EngineThread:
    """Makes an engine, runs its loop, and closes it when `with` ends, all on one thread.

    What an engine takes at its start often belongs to a thread: a CUDA device, OpenMP's threads, their cores. The
    thread is a daemon, so that a process that is interrupted while the engine is made need not wait for it.
    """

    def __init__(self, engine: Engine | Callable[[], Engine]) -> None:
        self._engine = engine
        self._loops: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self.made: Future[Engine] = Future()
        """The engine, or what the function raised."""
        self._closed: Future[None] = Future()

    def __enter__(self) -> "EngineThread":
        """Start the thread, and begin to make the engine."""
        threading.Thread(target=self._serve, name="tokenbus-engine", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Have the engine closed, without waiting for it."""
        self.close()

    def run(self, loop: Callable[[], None]) -> "Future[None]":
        """Call a function on the thread, once the engine is made."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        self._loops.put((loop, done))
        return done

    def close(self) -> "Future[None]":
        """Have the engine closed, once it is made and its loop has returned."""
        self._loops.put(None)
        return self._closed

    def _serve(self) -> None:
        for future in (self.made, self._closed):
            future.set_running_or_notify_cancel()
        try:
            engine = self._engine() if callable(self._engine) else self._engine
        except BaseException as error:  # noqa: BLE001 - who waits for the engine gets it
            self.made.set_exception(error)
            self._closed.set_result(None)
            return
        self.made.set_result(engine)
        while (loop := self._loops.get()) is not None:
            _call(*loop)
        _call(engine.close, self._closed)


def _call(function: Callable[[], None], done: "Future[None]") -> None:
    """Call a function, and tell who waits for it how it ended."""
    try:
        function()
    except BaseException as error:  # noqa: BLE001 - as above
        done.set_exception(error)
    else:
        done.set_result(None)
