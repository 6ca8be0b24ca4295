"""What signals mean to a command that looks after services: they stop, are killed, or are suspended with it."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

from tokenbus_services.cli.local.supervisor import Supervisor

T = TypeVar("T")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the last is sent when the terminal goes away


async def until_signal(system: Supervisor, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what some work with a system comes to; None where a signal, or `system.leave`, ended it before.

    A second signal kills what is still there, and a suspended terminal suspends all of it.
    """
    with _leaving_on_signal(system), suspended_together(system.groups):
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(system.leave.wait())
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not system.leave.is_set():
            return await working
        if not system.is_stopping:
            working.cancel()
        with suppress(asyncio.CancelledError):
            await working
        return None


@contextmanager
def _leaving_on_signal(system: Supervisor) -> Iterator[None]:
    """Let the first signal set `system.leave`, and the second `system.hurry`."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        """Note a signal."""
        (system.hurry if system.leave.is_set() else system.leave).set()

    # A hangup that is ignored already stays so, as under nohup. Not so SIGINT: a shell ignores it for all that a script
    # starts in the background, and means nothing by that.
    heard = [each for each in _SIGNALS if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]
    for each in heard:
        loop.add_signal_handler(each, on_signal)
    try:
        yield
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
