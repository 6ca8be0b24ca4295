"""A run as one record: what the JSON file holds, and what the tables, the figure and the page are made of."""

import platform
from collections.abc import Callable
from importlib.metadata import version

from benchmarks.errors import NotRunError
from benchmarks.gpu_ops import on_card, on_cpu
from benchmarks.gpu_ops.cases import QUICK_ROWS, QUICK_TOP_KS, ROWS, TOP_KS
from benchmarks.gpu_ops.goals import goals_of
from benchmarks.machine import cpu_name
from benchmarks.outputs import Record


def run(*, quick: bool, progress: Callable[[str], None]) -> Record:
    """Measure what can be measured here and return the record."""
    progress("the CPU twin")
    record: Record = {
        "benchmark": "gpu-ops",
        "quick": quick,
        "cpu_name": cpu_name(),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "cpu": on_cpu.measure(on_cpu.ROWS[:1] if quick else on_cpu.ROWS),
    }
    try:
        measured = on_card.measure(QUICK_ROWS if quick else ROWS, QUICK_TOP_KS if quick else TOP_KS, progress)
    except NotRunError as error:
        return record | {"card": str(error), "results": [], "peers": [], "host": {}, "goals": []}
    return record | measured | {"goals": goals_of(measured)}
