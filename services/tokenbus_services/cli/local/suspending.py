"""What Ctrl-Z means to a command that looks after others: they stop with it, and go on with it."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType


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
