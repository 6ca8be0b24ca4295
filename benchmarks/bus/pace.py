"""When steps are sent: at a rate, or as fast as the peer takes them; and the times at which they went and came."""

import time
from array import array
from collections.abc import Callable

import numpy as np

from benchmarks.bus.orders import Order, Sent, Stamps

_LEAST_STEPS = 10
"""Of a turn that is given a time: a rate needs some, however slow the peer."""


class Watch:
    """Notes the time of each step, and the processor time from the first one on."""

    def __init__(self) -> None:
        """Begin without a step."""
        self._at = array("q")
        self._cpu_began = 0

    def note(self) -> None:
        """Note that a step is there."""
        if not self._at:
            self._cpu_began = time.process_time_ns()
        self._at.append(time.monotonic_ns())

    @property
    def count(self) -> int:
        """How many steps were noted."""
        return len(self._at)

    @property
    def at(self) -> Stamps:
        """When they were noted."""
        return np.array(self._at, np.int64)

    @property
    def cpu_ns(self) -> int:
        """The processor time of this process, all its threads, since the first step."""
        return time.process_time_ns() - self._cpu_began


def send_all(order: Order, send: Callable[[int], None]) -> Watch:
    """Send an order's steps, numbered from 1, each noted before anything is done for it."""
    watch = Watch()
    begin = time.monotonic()
    end = begin + order.seconds if order.seconds else float("inf")
    number = 0
    least = order.steps or _LEAST_STEPS
    while number < least or (not order.steps and time.monotonic() < end):
        if order.rate and (pause := begin + number / order.rate - time.monotonic()) > 0:
            time.sleep(pause)
        number += 1
        watch.note()
        send(number)
    return watch


def sent(watch: Watch) -> Sent:
    """Return what a sender answers, once all that it started is done."""
    return Sent(watch.at, watch.cpu_ns)
