"""A metric: its name, its meaning, what to do about it, and how it is read."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

Subject = TypeVar("Subject")
Samples = Iterable[tuple[tuple[str, ...], float]]


SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds, in seconds."""


class Histogram:
    """Counts values by their upper bounds. One thread counts; any other may read."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        """Take the buckets' upper bounds, in order."""
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


class Kind(StrEnum):
    """The kind of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family(Generic[Subject]):
    """One metric of a subject."""

    kind: Kind
    name: str
    """As it is queried; its last word, or the one before `total`, is its unit."""
    meaning: str
    advice: str
    """What to do when it is high, or when it moves."""
    read: Callable[[Subject], Samples | Histogram]
    labels: tuple[str, ...] = ()
    """Labels with few values: never a request, a client's name or the text of an error."""
    alert: str = ""
    """The condition of its alert, in PromQL; empty: it has none."""

    @property
    def help(self) -> str:
        """The help text."""
        return f"{self.meaning} {self.advice}"

    def collect(self, subject: Subject) -> Metric:
        """Read the metric."""
        found = self.read(subject)
        if isinstance(found, Histogram):
            histogram = HistogramMetricFamily(self.name, self.help)
            histogram.add_metric([], found.buckets(), found.sum)
            return histogram
        maker = CounterMetricFamily if self.kind is Kind.COUNTER else GaugeMetricFamily
        family = maker(self.name, self.help, labels=self.labels)
        for labels, value in found:
            family.add_metric(labels, value)
        return family


def one(value: float | None) -> Samples:
    """Return the samples of a metric without labels; none if there is no value."""
    return () if value is None else (((), value),)


def collect(families: Sequence[Family[Subject]], subject: Subject) -> Iterator[Metric]:
    """Read metrics, one after the other."""
    return (family.collect(subject) for family in families)
