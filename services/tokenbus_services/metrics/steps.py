"""How long steps take, measured as they are handed out."""

import time
from collections.abc import Callable

from tokenbus_services.delivery import Step
from tokenbus_services.metrics.histogram import Histogram

_NS = 1_000_000_000


class StepTimes:
    """Times steps; costs a microsecond or two a step, whatever its rows hold."""

    def __init__(self, now: Callable[[], float], wall_ns: Callable[[], int] = time.time_ns) -> None:
        """Take the processor's clock, and the time of day in nanoseconds."""
        self._now = now
        self._wall_ns = wall_ns
        self.assembly = Histogram()
        self.delivery = Histogram()

    def observe(self, step: Step) -> None:
        """Measure a step that was handed to its requests."""
        self.assembly.observe(self._now() - step.first_arrival)
        if produced := step.rows.header.produced_at_ns:
            # The worker's clock may be ahead of ours: what arrives before it was made took no time.
            self.delivery.observe(max(0, self._wall_ns() - produced) / _NS)
