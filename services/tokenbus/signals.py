"""SIGTERM and SIGINT: the first signal shuts a service down, and the second signal ends the process at once."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tokenbus.logs import logger

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_log = logger("service")


@contextmanager
def stop_on_signals() -> Iterator[asyncio.Event]:
    """Yield an event that the first signal sets. The second signal ends the process. Call this in the main thread."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        # The event loop's signal handlers would not run while a stopped terminal blocks the loop.
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        loop.call_soon_threadsafe(stop_service, number)

    def stop_service(number: int) -> None:
        _log.info("stopping; a second signal ends it at once", signal=signal.Signals(number).name)
        stop.set()

    before = {each: signal.signal(each, on_signal) for each in _SIGNALS}
    try:
        yield stop
    finally:
        for each, handler in before.items():
            if signal.getsignal(each) is on_signal:
                signal.signal(each, handler)
