"""A metric: its name, its help text, its labels, and how it is read."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate
from typing import Generic, Literal, TypeVar

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Subject = TypeVar("Subject")
Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values, each with the values of its labels."""


SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.004, 0.005, 0.0075, 0.01),
    *(0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""Upper bounds, in seconds; fine where a step's times are."""


class Histogram:
    """Counts values by their upper bounds. One thread counts; any other may read."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return each bucket's bound, as text, and how many values are at most that; the last has them all."""
        names = [*map(str, self._bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(list(self._counts))), strict=True))

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self._counts)


@dataclass(frozen=True, slots=True)
class Family(Generic[Subject]):
    """One metric of a subject; docs/metrics.md says what to do about it."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    """As it is queried; its last word, or the one before `total`, is its unit."""
    help: str
    read: Callable[[Subject], float | Samples | Histogram]
    labels: tuple[str, ...] = ()
    """Labels with few values: never a request, a client's name or the text of an error."""

    def collect(self, subject: Subject) -> Metric:
        """Read the metric."""
        found = self.read(subject)
        if isinstance(found, Histogram):
            histogram = HistogramMetricFamily(self.name, self.help)
            histogram.add_metric([], found.buckets(), found.sum)
            return histogram
        maker = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = maker(self.name, self.help, labels=self.labels)
        for labels, value in found if isinstance(found, Iterable) else (((), found),):
            family.add_metric(labels, value)
        return family


def counter(name: str, meaning: str, read: Callable[[Subject], float | Samples], *labels: str) -> Family[Subject]:
    """Return a metric that only grows."""
    return Family("counter", name, meaning, read, labels)


def gauge(name: str, meaning: str, read: Callable[[Subject], float | Samples], *labels: str) -> Family[Subject]:
    """Return a metric that rises and falls."""
    return Family("gauge", name, meaning, read, labels)


def histogram(name: str, meaning: str, read: Callable[[Subject], Histogram]) -> Family[Subject]:
    """Return a metric of how many values lie below each of a few bounds."""
    return Family("histogram", name, meaning, read)


def each(counts: Mapping[str, float]) -> Samples:
    """Return the samples of a metric with one label, from its values by label; copied, as they change meanwhile."""
    return (((name,), value) for name, value in dict(counts).items())


def attributes(subject: object, *names: str) -> Samples:
    """Return the samples of a metric with one label: a subject's attributes, each under its name."""
    return (((name,), getattr(subject, name)) for name in names)


class FamilyCollector(Collector, Generic[Subject]):
    """Reads a service's plain counters when it is scraped, on the thread that scrapes."""

    def __init__(self, service: str, families: Sequence[Family[Subject]], subject: Callable[[], Subject]) -> None:
        self._service = service
        self._families = families
        self._subject = subject

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, then the version that runs, and what prometheus_client tells of every process."""
        subject = self._subject()
        for family in self._families:
            yield family.collect(subject)
        build = GaugeMetricFamily(
            "tokenbus_build_info",
            "Always 1; says which version of Tokenbus runs as what.",
            labels=("version", "service"),
        )
        build.add_metric((version("tokenbus"), self._service), 1)
        yield build
        yield from ProcessCollector(registry=None).collect()
