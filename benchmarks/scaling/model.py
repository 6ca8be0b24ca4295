"""The model: what a step costs in each process, what that allows a system, and what it means for a thousand GPUs."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.outputs import Record

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


def fitted(cells: Sequence[Record]) -> dict[str, Cost]:
    """Return the costs of each kind of process that are nearest to those measured in all cells."""
    readers = np.array([cell["readers"] for cell in cells], float)
    found = {}
    for kind in cells[0]["microseconds_a_step"]:
        costs = np.array([cell["microseconds_a_step"][kind] for cell in cells], float)
        slope, constant = np.polyfit(readers, costs, 1) if np.unique(readers).size > 1 else (0.0, costs.mean())
        if slope < 0:
            slope, constant = 0.0, costs.mean()
        elif constant < 0:
            slope, constant = (readers @ costs) / (readers @ readers), 0.0
        found[kind] = Cost(float(constant), float(slope))
    return found


def predicted(costs: dict[str, Cost], counts: dict[str, int], cores: int) -> Prediction:
    """Return at how many steps a second the first kind of process, or all cores together, would be busy.

    A kind without a count, as a nats-server, which has threads for all cores, is bound by the cores alone.
    """
    each = {kind: cost.at(counts["reader"]) for kind, cost in costs.items()}
    most = {kind: counts[kind] / each[kind] * 1e6 for kind in counts} | {"cores": cores / sum(each.values()) * 1e6}
    limit = min(most, key=lambda name: most[name])
    return Prediction(most[limit], limit)


def on_paper(record: Record, run: Record) -> Iterator[str]:
    """Yield the lines of the table of a thousand GPUs by a run's model: what a token costs, and what that is in all."""
    tokens = record["tokens_a_step"]
    steps = _GPUS * _STEPS
    yield (
        f"{_GPUS:,} GPUs, {_STEPS} steps/s each, of {record['rows']} rows x {tokens // record['rows']} tokens: "
        f"{steps:,} steps/s, {steps * tokens / 1e6:.1f} million tokens/s, k = {run['k']}"
    )
    yield f"{'':<52}{'a token':>12}  in all"
    for kind, cost in run["model"].items():
        each = Cost(*cost).at(_READERS)
        of = f", {_READERS} readers a step" if cost[1] else ""
        cores = np.ceil(steps * each / 1e6 / _BUSY)
        yield f"{f'{kind}{of}':<52}{each / tokens:>9.2f} us  {cores:,.0f} cores, {_BUSY:.0%} busy"


def bytes_on_paper(record: Record) -> Iterator[str]:
    """Yield the lines of what the same thousand GPUs send, and a log keeps."""
    for name, size in record["bytes_a_token"].items():
        a_second = size * record["tokens_a_step"] * _GPUS * _STEPS
        where = f"network, each way, and each log's disk, k = {name}"
        yield f"{where:<52}{size:>10.1f} B  {a_second / 1e9:,.2f} GB/s, {a_second * 8 / _GPUS / 1e6:,.1f} Mbit/s a GPU"
