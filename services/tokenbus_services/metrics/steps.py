"""What is measured of each step as it is handed out."""

import time
from collections import OrderedDict
from collections.abc import Callable

from tokenbus_services.delivery import Step
from tokenbus_services.metrics.histogram import Histogram
from tokenbus_services.metrics.speculation import Speculation

_NS = 1_000_000_000


class StepStatistics:
    """Times steps and counts their draft tokens; costs a few microseconds a step, whatever its rows hold."""

    def __init__(self, most_workers: int, now: Callable[[], float], wall_ns: Callable[[], int] = time.time_ns) -> None:
        """Tell at most so many workers apart; take the processor's clock, and the time of day in nanoseconds."""
        self._most_workers = most_workers
        self._now = now
        self._wall_ns = wall_ns
        self._speculation: OrderedDict[str, Speculation] = OrderedDict()
        self.assembly = Histogram()
        self.delivery = Histogram()

    def observe(self, step: Step) -> None:
        """Measure a step that was handed to its requests."""
        rows = step.rows
        self.assembly.observe(self._now() - step.first_arrival)
        if produced := rows.header.produced_at_ns:
            # The worker's clock may be ahead of ours: what arrives before it was made took no time.
            self.delivery.observe(max(0, self._wall_ns() - produced) / _NS)
        speculation = self._speculation.get(step.worker_id)
        if speculation is None:
            speculation = self._new(step.worker_id)
        self._speculation.move_to_end(step.worker_id)  # so that whoever gives way is one that is gone
        speculation.add(rows)

    def speculation(self) -> list[tuple[str, Speculation]]:
        """Return what was counted, by worker."""
        return list(self._speculation.items())

    def _new(self, worker_id: str) -> Speculation:
        if len(self._speculation) >= self._most_workers:
            self._speculation.popitem(last=False)
        speculation = self._speculation[worker_id] = Speculation()
        return speculation
