"""Family: the name, the labels and the help text of a metric, and a function that reads the values."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Subject = TypeVar("Subject")
Samples = Mapping[Any, float]
"""Values of a metric by label value, or by a tuple of label values if the metric has several labels."""

SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.004, 0.005, 0.0075, 0.01),
    *(0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""Upper bounds of buckets in seconds, dense around the duration of a step."""


class Histogram:
    """Counts values per bucket. Only one thread may count, and any thread may read."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._array_of_bounds = np.array(self._bounds)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: npt.NDArray[np.float64]) -> None:
        if values.size:
            counts = np.bincount(self._array_of_bounds.searchsorted(values))
            for place, count in enumerate(counts.tolist()):
                self._counts[place] += count
            self.sum += float(values.sum())

    def buckets(self) -> list[tuple[str, float]]:
        """Return the upper bound and the cumulative count of each bucket."""
        names = [*map(str, self._bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))

    @property
    def count(self) -> int:
        return sum(self._counts)


@dataclass(frozen=True)
class Family(Generic[Subject]):
    """A metric, and the function that reads its value from an object, the subject."""

    title: str
    """The name of the metric, then the labels in braces. Labels must have few values, so requests cannot be labels.

    The unit is the last word of the name, or the last word before `total`.
    """
    help: str
    advice: str
    """The advice to the operator in docs/metrics.md, or empty for vLLM's own metrics."""
    read: Callable[[Subject], "float | Samples | Histogram | Mapping[str, Histogram]"]
    is_histogram: bool = False

    @property
    def name(self) -> str:
        """The name of the metric without labels."""
        return self.title.partition("{")[0]

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(filter(None, self.title.partition("{")[2].rstrip("}").split(", ")))

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        """The Prometheus type. A name with `_total` is a counter."""
        if self.is_histogram:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"

    def collect(self, subject: Subject) -> Metric:
        found: Any = self.read(subject)
        # Copy the mapping atomically, because the service may change it in another thread.
        samples = dict(found).items() if isinstance(found, Mapping) else [((), found)]
        family: Any = _MAKERS[self.kind](self.name, self.help, labels=self.labels)
        for label, value in samples:
            values = (value.buckets(), value.sum) if self.is_histogram else (value,)
            family.add_metric((label,) if isinstance(label, str) else label, *values)
        made: Metric = family
        return made


_MAKERS: dict[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def fill_ratio(read: Callable[[Subject], Samples]) -> Family[Subject]:
    return Family(
        "tokenbus_fill_ratio{of}",
        "Fill level of the fullest buffer or table of each kind, from 0 to 1.",
        "If near 1, find the slow consumer. For `send_queue` and `buffers`, clients do not read. For `pending` and "
        "`step_queue`, a client or an iterator is slow. For `unread_bytes`, the event loop is slow. For `retention`, "
        "the processor is absent or its clients are slow. For `log_buffer`, the log is slow.",
        read,
    )


def event_loop_lag(read: Callable[[Subject], Histogram]) -> Family[Subject]:
    return Family(
        "tokenbus_event_loop_lag_seconds",
        "Delay of the event loop.",
        "If high, give the process a core, add a processor or gateway, or use `with Publisher` in a worker.",
        read,
        is_histogram=True,
    )


class FamilyCollector(Collector, Generic[Subject]):
    """Reads the counters of a service at each scrape, on the thread of the scrape."""

    def __init__(self, service: str, families: Sequence[Family[Subject]], subject: Callable[[], Subject]) -> None:
        self._service = service
        self._families = families
        self._subject = subject

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the service, the version, and the process metrics of prometheus_client."""
        subject = self._subject()
        for family in self._families:
            yield family.collect(subject)
        build = {"version": version("tokenbus"), "service": self._service}
        about = "Always 1; the labels are the version of Tokenbus and the service."
        yield InfoMetricFamily("tokenbus_build", about, build)
        yield from ProcessCollector(registry=None).collect()
