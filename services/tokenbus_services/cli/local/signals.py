"""What signals mean to a command that looks after services: they stop, are killed, or are suspended with it."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the last is sent when the terminal goes away


@contextmanager
def stop_on_signal(hurry: asyncio.Event) -> Iterator[asyncio.Event]:
    """Yield an event that the first signal sets; the second sets the one that was given."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_signal() -> None:
        """Note a signal."""
        (hurry if stop.is_set() else stop).set()

    # A hangup that is ignored already stays so, as under nohup. Not so SIGINT: a shell ignores it for all that a script
    # starts in the background, and means nothing by that.
    heard = [each for each in _SIGNALS if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]
    for each in heard:
        loop.add_signal_handler(each, on_signal)
    try:
        yield stop
    finally:
        for each in heard:
            loop.remove_signal_handler(each)


@contextmanager
def suspended_together(groups: Callable[[], Iterable[int]]) -> Iterator[None]:
    """Let SIGTSTP stop process groups and then this process; when that goes on, they do."""

    def suspend(_number: int, _frame: FrameType | None) -> None:
        stopped = list(groups())
        _send(stopped, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)  # it returns when a shell's `fg` or `bg` lets this process go on
        _send(stopped, signal.SIGCONT)

    if signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL:  # a shell without jobs ignores it
        yield
        return
    signal.signal(signal.SIGTSTP, suspend)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)


def _send(groups: Iterable[int], number: signal.Signals) -> None:
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, number)
