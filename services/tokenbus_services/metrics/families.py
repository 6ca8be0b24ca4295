"""Family: one metric with its name, its meaning, what to do about it, and how it is read."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from tokenbus_services.metrics.histogram import Histogram

Subject = TypeVar("Subject")
Samples = Iterable[tuple[tuple[str, ...], float]]


class Kind(StrEnum):
    """What a metric is."""

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
    """None of them may have unbounded values: never a request, a client's name or an error's text."""
    alert: str = ""
    """A condition in PromQL that is worth waking somebody for; empty: none is."""

    @property
    def help(self) -> str:
        """What is told beside the metric."""
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
