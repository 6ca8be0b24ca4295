"""A record as one figure."""

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.outputs import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (12.0, 5.0)
_DPI = 110
_COLOURS = {0: "#56b4e9", 5: "#0072b2", 20: "#003f6b", 64: "#e69f00"}
_MANY_ROWS = 256
_NARROW = 2
"""Sizes nearer to each other than by this have no room for both labels."""
_KINDS = {"random": "-", "peaked": "--", "ascending": ":", "descending": "-."}


def plot(record: Record, folder: Path) -> None:
    """Write gpu-ops.png and gpu-ops.svg into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # Text stays text and ids do not depend on the run, so that the same figures give the same, small, file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tokenbus", "font.size": 9}):
        figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        _beside(left, record)
        _kinds(right, record)
        figure.savefig(folder / "gpu-ops.svg", metadata={"Date": None, "Creator": None})
        figure.savefig(folder / "gpu-ops.png", metadata={"Software": None})


def _beside(axes: "Axes", record: Record) -> None:
    chosen = [r for r in record["results"] if (r["dtype"], r["kind"]) == ("bfloat16", "random")]
    rows = sorted({result["rows"] for result in chosen})
    floor = [next(r["floor_us"] for r in chosen if r["rows"] == count) for count in rows]
    axes.plot(rows, floor, color="#555555", linewidth=1, label="floor: reading once")
    for top_k in sorted({result["top_k"] for result in chosen}):
        mine = [r for r in chosen if r["top_k"] == top_k]
        colour = _COLOURS.get(top_k)
        axes.plot(
            rows, [r["kernel_us"] for r in mine], "o-", color=colour, markersize=3, label=f"Tokenbus, k = {top_k}"
        )
        if all("torch" in r["peers"] for r in mine) and top_k in (0, 20):
            taken = [r["peers"]["torch"] for r in mine]
            axes.plot(rows, taken, "s--", color=colour, markersize=3, label=f"torch, k = {top_k}")
    axes.set_yscale("log")
    _finish(axes, rows, "bfloat16, random logits, on the card", "microseconds")


def _kinds(axes: "Axes", record: Record) -> None:
    rows: list[int] = []
    for kind, style in _KINDS.items():
        for top_k in (0, 20):
            chosen = [
                result
                for result in record["results"]
                if (result["dtype"], result["kind"], result["top_k"]) == ("bfloat16", kind, top_k)
                and result["rows"] >= _MANY_ROWS
            ]
            rows = [result["rows"] for result in chosen]
            times = [result["kernel_us"] / result["floor_us"] for result in chosen]
            axes.plot(rows, times, style, color=_COLOURS[top_k], label=f"{kind}, k = {top_k}")
    _finish(axes, rows, f"times the floor, from {_MANY_ROWS} rows, by kind of logits", "times reading the logits once")


def _finish(axes: "Axes", rows: list[int], title: str, label: str) -> None:
    axes.set_xscale("log", base=2)
    labelled = [count for count in rows if not any(count / _NARROW < other < count for other in rows)]
    axes.set_xticks(labelled, [str(count) for count in labelled])
    axes.set_xlabel("rows")
    axes.set_ylabel(label)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
