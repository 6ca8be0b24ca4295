"""What SIGTERM and SIGINT mean to a service: the first asks it to leave, the second takes it away."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tokenbus_services.logs import logger

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_log = logger("service")


@contextmanager
def stop_on_signals() -> Iterator[asyncio.Event]:
    """Yield an event that the first signal sets; the second ends the process at once, whatever it waits for."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def asked(number: int, _frame: FrameType | None) -> None:
        # The event loop's own handlers would only run when it turns, which it may not do: a terminal can be stopped.
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        loop.call_soon_threadsafe(leave, number)

    def leave(number: int) -> None:
        _log.info("stopping; a second signal ends it at once", signal=signal.Signals(number).name)
        stop.set()

    before = {each: signal.signal(each, asked) for each in _SIGNALS}
    try:
        yield stop
    finally:
        for each, handler in before.items():
            if signal.getsignal(each) is asked:
                signal.signal(each, handler)
