"""A coroutine on an event loop in a thread of its own."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from tokenbus.logs import logger

T = TypeVar("T")
_log = logger("service")


def start_loop_thread(
    name: str, run: Callable[["Future[T]"], Coroutine[Any, Any, None]], *, daemon: bool = False
) -> tuple[threading.Thread, T]:
    """Start a thread that runs a coroutine; return the thread, to be joined, and the result of the coroutine's start.

    The coroutine is given a future and sets it once it is ready. Blocks until then, and raises what the coroutine
    raised before; what it raises later is logged.
    """
    started: Future[T] = Future()

    def run_loop() -> None:
        try:
            asyncio.run(run(started))
        except Exception as error:  # noqa: BLE001 - any error is the starter's, or the log's
            if not started.done():
                started.set_exception(error)
            else:
                _log.exception("event loop thread failed", thread=name)

    thread = threading.Thread(target=run_loop, name=name, daemon=daemon)
    thread.start()
    try:
        return thread, started.result()
    except BaseException:
        thread.join()
        raise
