"""The model: what a step costs in each process, what that allows a system, and what it means for a thousand GPUs."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks.report import Row
from benchmarks.scaling.system import ROWS, TOKENS_A_ROW, Sample, Shape

PLACES = ("worker", "processor", "reader")
"""The kinds of processes that a shape has a number of."""
_GPUS, _STEPS, _READERS, _BUSY = 1000, 40, 4, 0.7
"""On paper: how many GPUs, steps of each a second, readers whose rows a step has, and how busy a process is to be."""


class Cost(NamedTuple):
    """Processor microseconds of a step in the processes of a kind: so much, and so much for each reader of its rows."""

    step: float
    reader: float

    def at(self, readers: int) -> float:
        """Return what a step costs whose rows go to so many readers."""
        return self.step + self.reader * readers


class Prediction(NamedTuple):
    """How many steps a second a system carries, and what it is that carries no more."""

    steps: float
    limit: str


def fitted(found: Mapping[Shape, Sequence[Sample]]) -> dict[str, Cost]:
    """Return the costs of each kind of process that are nearest to those measured in all systems."""
    readers = np.array([shape.readers for shape in found], float)
    costs_of = {}
    for kind in next(iter(found.values()))[0].costs:
        costs = np.array([median(each.costs[kind] for each in taken) for taken in found.values()])
        slope, constant = np.polyfit(readers, costs, 1) if np.unique(readers).size > 1 else (0.0, costs.mean())
        if slope < 0:
            slope, constant = 0.0, costs.mean()
        elif constant < 0:
            slope, constant = (readers @ costs) / (readers @ readers), 0.0
        costs_of[kind] = Cost(float(constant), float(slope))
    return costs_of


def predicted(costs: dict[str, Cost], counts: dict[str, int], cores: int) -> Prediction:
    """Return at how many steps a second the first kind of process, or all cores together, would be busy.

    A kind without a count, as a nats-server, which has threads for all cores, is bound by the cores alone.
    """
    each = {kind: cost.at(counts["reader"]) for kind, cost in costs.items()}
    most = {kind: counts[kind] / each[kind] * 1e6 for kind in counts} | {"cores": cores / sum(each.values()) * 1e6}
    limit = min(most, key=lambda name: most[name])
    return Prediction(most[limit], limit)


def on_paper(costs: dict[str, Cost], tokens: int) -> Iterator[Row]:
    """Yield what a token costs each kind of process of a thousand GPUs, and how many cores that is in all."""
    for kind, cost in costs.items():
        each = cost.at(_READERS)
        cores = float(np.ceil(_GPUS * _STEPS * each / 1e6 / _BUSY))
        yield {"process": kind, "a token, us": each / tokens, f"cores, {_BUSY:.0%} busy": cores}


def bytes_on_paper(bytes_a_token: Mapping[int | None, float]) -> Iterator[Row]:
    """Yield what a thousand GPUs send each way, and a log keeps, by the alternatives of each token."""
    for top_k, size in bytes_a_token.items():
        a_second = size * ROWS * TOKENS_A_ROW * _GPUS * _STEPS
        yield {
            "k": "none" if top_k is None else top_k,
            "a token, B": size,
            "GB/s": a_second / 1e9,
            "Mbit/s a GPU": a_second * 8 / _GPUS / 1e6,
        }
