"""What signals mean to a command that looks after others: the first asks it to stop them, the second to make haste."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the last is what a terminal leaves behind


@contextmanager
def told_to_stop(hurry: asyncio.Event) -> Iterator[asyncio.Event]:
    """Yield an event that the first signal sets; the second sets the one that was given."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def asked() -> None:
        """Note a signal."""
        (hurry if stop.is_set() else stop).set()

    # A hangup that is ignored already stays so, as under nohup. Not so SIGINT: a shell ignores it for all that a script
    # starts in the background, and means nothing by that.
    heard = [each for each in _SIGNALS if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]
    for each in heard:
        loop.add_signal_handler(each, asked)
    try:
        yield stop
    finally:
        for each in heard:
            loop.remove_signal_handler(each)
