"""An interrupt raises KeyboardInterrupt in these tests, also where they run as a job in the background."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Handle SIGINT as Python does in a terminal; a shell starts what is to run in the background with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
