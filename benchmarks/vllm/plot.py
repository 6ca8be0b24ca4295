"""A record as one figure: the most streams, by top-k."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.outputs import Record
from benchmarks.processes import MODEL
from benchmarks.vllm.cells import COMPLETIONS
from benchmarks.vllm.systems import TOKENBUS, VLLM

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (12.0, 4.2)
_DPI = 110
_WIDTH = 0.4
_COLOURS = {VLLM: "#e69f00", TOKENBUS: "#0072b2"}


def plot(record: Record, folder: Path, name: str = "vllm") -> None:
    """Write a figure as PNG and as SVG into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    streams = max(cell["streams"] for cell in record["cells"])
    chosen = [cell for cell in record["cells"] if (cell["endpoint"], cell["streams"]) == (COMPLETIONS, streams)]
    chosen = chosen or [cell for cell in record["cells"] if cell["streams"] == streams]
    # Text stays text and ids do not depend on the run, so that the same figures give the same, small, file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tokenbus", "font.size": 9}):
        figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        left, middle, right = figure.subplots(1, 3)
        for axes, title, value in (
            (left, "tokens a second", lambda found: found["tokens_per_second"]),
            (middle, _processor_title(chosen), _processor),
            (right, "milliseconds to the first token", lambda found: found["first_ms"]),
        ):
            _bars(axes, chosen, title, value)
        figure.suptitle(f"vLLM {record['vllm']}, {streams} streams, by logprobs: its own API server, and Tokenbus")
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
        figure.savefig(folder / f"{name}.png", metadata={"Software": None})


def _bars(axes: "Axes", chosen: list[Record], title: str, value: Callable[[Record], float]) -> None:
    for at, (name, colour) in enumerate(_COLOURS.items()):
        heights = [value(cell["medians"][name]) for cell in chosen]
        places = [place + (at - 0.5) * _WIDTH for place in range(len(chosen))]
        bars = axes.bar(places, heights, _WIDTH, color=colour, label=name)
        axes.bar_label(bars, [f"{height:,.0f}" for height in heights], fontsize=7, padding=2)
    axes.set_xticks(range(len(chosen)), ["none" if c["top_k"] == "none" else f"k = {c['top_k']}" for c in chosen])
    axes.set_title(title)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize="small")


def _processor(found: Record) -> float:
    """Return the processor time outside the model, or of all where that cannot be told apart."""
    return float(found["outside_us"] if found["outside_us"] is not None else sum(found["cpu_us"].values()))


def _processor_title(chosen: list[Record]) -> str:
    where = " outside the model" if all(MODEL in c["medians"][n]["cpu_us"] for c in chosen for n in _COLOURS) else ""
    return f"processor time{where}, microseconds a token"
