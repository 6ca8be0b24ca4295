"""An interrupt raises KeyboardInterrupt in these tests, also where they run as a job in the background."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Handle SIGINT as Python does in a terminal; a shell starts what is to run in the background with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def interrupted(condition: Callable[[], object]) -> Iterator[None]:
    """Interrupt the main thread once a condition holds, and expect that this ends what it does."""

    def interrupt() -> None:
        wait_until(condition)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    thread.join()
