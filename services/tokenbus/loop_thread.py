"""Runs a coroutine on an event loop in a new thread."""

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
    """Start a thread that runs a coroutine. Return the thread, which the caller must join, and the result of the start.

    The coroutine receives a future, and sets the future's result when the start is complete. This function waits for
    the result. If the coroutine fails earlier, its exception is raised here; a later exception is logged.
    """
    started: Future[T] = Future()

    def run_loop() -> None:
        try:
            asyncio.run(run(started))
        except Exception as error:  # noqa: BLE001 - raised by the caller, or logged
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
