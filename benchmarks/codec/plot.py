"""A record as one figure."""

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.codec.record import OURS, headline
from benchmarks.outputs import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (12.0, 5.2)
_DPI = 110
_TOKENS, _TOP_K = 3, "5"
_K_COLOURS = {"0": "#56b4e9", "5": "#0072b2", "20": "#003f6b", "mixed": "#e69f00"}
_LINE_COLOURS = ("#009e73", "#009e73", "#009e73", "#d55e00", "#e69f00", "#7a1fa2", "#7a1fa2", "#cc79a7", "#555555")
_LINE_STYLES = ("-", "--", ":", "-", "-", "-", "--", "-", "-")


def plot(record: Record, folder: Path) -> None:
    """Write codec.png and codec.svg into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # Text stays text and ids do not depend on the run, so that the same figures give the same, small, file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tokenbus", "font.size": 9}):
        figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
        _by_peer(left, record)
        _by_rows(right, record)
        figure.savefig(folder / "codec.svg", metadata={"Date": None, "Creator": None})
        figure.savefig(folder / "codec.png", metadata={"Software": None})


def _by_peer(axes: "Axes", record: Record) -> None:
    peers = [peer for peer in record["peers"] if not peer["not_run"]]
    results = headline(record)
    for result in results:
        medians = [result["peers"][peer["name"]]["median_us"] for peer in peers]
        label = f"k = {result['top_k']}"
        axes.plot(medians, range(len(peers)), "o", color=_K_COLOURS[result["top_k"]], label=label)
    axes.set_xscale("log")
    axes.set_yticks(range(len(peers)), [peer["label"] for peer in peers])
    axes.invert_yaxis()
    axes.set_xlabel("microseconds a step, median")
    axes.set_title(f"{results[0]['rows']} rows x {results[0]['tokens_per_row']} tokens")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def _by_rows(axes: "Axes", record: Record) -> None:
    results = [r for r in record["results"] if (r["tokens_per_row"], r["top_k"]) == (_TOKENS, _TOP_K)]
    rows = [result["rows"] for result in results]
    peers = [peer for peer in record["peers"] if peer["delivers"]]
    for peer, colour, style in zip(peers, _LINE_COLOURS, _LINE_STYLES, strict=True):
        if peer["not_run"]:
            continue
        times = [result["peers"][peer["name"]]["times_ours"] for result in results]
        width = 2.5 if peer["name"] == OURS else 1.5
        axes.plot(rows, times, style, color=colour, marker="o", markersize=3, linewidth=width, label=peer["label"])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(rows, [str(count) for count in rows])
    axes.set_xlabel("rows")
    axes.set_ylabel("times Tokenbus's")
    axes.set_title(f"The same over rows, at {_TOKENS} tokens and k = {_TOP_K}")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize="small")
