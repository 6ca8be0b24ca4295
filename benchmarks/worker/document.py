"""The page for docs/: what was printed, and what it means."""

from collections.abc import Mapping, Sequence

from benchmarks.machine import in_words
from benchmarks.worker.tables import cost_table, rate_table
from benchmarks.worker.thread import Cost

_ABOUT = """\
# What a worker costs its engine

Written by `python -m benchmarks.worker --write-docs`; [worker.json](worker.json) has every figure.

The first table is the processor time of the engine's thread for a step of 256 rows x 3 tokens, in microseconds: the
step's arrays are there, on the host, and 200 steps a second go to a processor in another process, which hands each to
an iterator. "Handed over" is what `tokenbus worker` does: its `Outbox` takes the step's arrays, and another thread
assembles and publishes them. An engine that calls `StepAssembler.assemble` and `Publisher.publish` itself pays "both".

The second is the ngram engine with its default options through three processes, `tokenbus worker`, `tokenbus processor`
and a `Client` with 256 requests open all the time, on however many cores there are; medians of the rounds.
"""


def page(costs: Sequence[Cost], rates: dict[int | None, float], machine: Mapping[str, str]) -> str:
    """Return the page."""
    return f"{_ABOUT}\nMachine: {in_words(machine)}.\n\n{cost_table(costs)}\n{rate_table(rates)}"
