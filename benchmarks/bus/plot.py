"""A record as one figure."""

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.bus.figures import QUANTILES
from benchmarks.bus.goals import P50_US, P99_US, STEPS_S
from benchmarks.outputs import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (12.0, 9.0)
_DPI = 110
_COLOURS = {
    "tokenbus": "#009e73",
    "tokenbus_rows": "#56b4e9",
    "tokenbus_steps": "#0072b2",
    "tokenbus_keys": "#cc79a7",
    "tokenbus_nats": "#27aae1",
    "tokenbus_remote": "#7a1fa2",
    "fastdeploy_sysv": "#d55e00",
    "fastdeploy_pickle": "#e69f00",
    "zeromq": "#555555",
}
_BARS = ("#56b4e9", "#0072b2", "#003f6b")
_AXES = ("rows", "open requests")


def plot(record: Record, folder: Path) -> None:
    """Write bus.png and bus.svg into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # Text stays text and ids do not depend on the run, so that the same figures give the same, small, file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tokenbus", "font.size": 9}):
        figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(2, 2)
        _latency(panels[0][0], record)
        _throughput(panels[0][1], record)
        _scaling(panels[1][0], record)
        _memory(panels[1][1], record)
        figure.savefig(folder / "bus.svg", metadata={"Date": None, "Creator": None})
        figure.savefig(folder / "bus.png", metadata={"Software": None})


def _first_of(record: Record, top_k: int) -> list[Record]:
    """Return each peer's result at one k over its first transport, in the order of the tables."""
    found: dict[str, Record] = {}
    for result in sorted(record["results"], key=lambda each: str(each["transport"])):
        if result["top_k"] == top_k:
            found.setdefault(result["peer"], result)
    return [found[peer["name"]] for peer in record["peers"] if peer["name"] in found]


def _label(record: Record, name: str) -> str:
    return next(str(peer["label"]) for peer in record["peers"] if peer["name"] == name)


def _latency(axes: "Axes", record: Record) -> None:
    places = range(len(QUANTILES))
    for result in _first_of(record, record["settings"]["top_ks"][0]):
        late, name = result["latency_us"], result["peer"]
        label = f"{_label(record, name)} ({result['transport']})"
        colour = _COLOURS[name]
        axes.plot(places, [late[str(each)] for each in QUANTILES], color=colour, marker="o", markersize=3, label=label)
        if "last_taken" in late:
            taken = [late["last_taken"][str(each)] for each in QUANTILES]
            axes.plot(places, taken, "--", color=colour, label="its last row taken")
    axes.plot([QUANTILES.index(50), QUANTILES.index(99)], [P50_US, P99_US], "kv", label="goals")
    axes.set_yscale("log")
    axes.set_xticks(places, [f"{each:g}" if each < QUANTILES[-1] else "max" for each in QUANTILES])
    axes.set_xlabel("percentile")
    axes.set_ylabel("microseconds")
    axes.set_ylim(top=axes.get_ylim()[1] * 50)  # room for the legend
    axes.set_title(f"Publish to delivery at {record['settings']['rate']:g} steps/s, k = 0")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize="small")


def _throughput(axes: "Axes", record: Record) -> None:
    top_ks = record["settings"]["top_ks"]
    height = 0.8 / len(top_ks)
    names = [result["peer"] for result in _first_of(record, top_ks[0])]
    for place, top_k in enumerate(top_ks):
        results = _first_of(record, top_k)
        values = [result["throughput"]["steps_s"] for result in results]
        rows = [row + place * height for row in range(len(results))]
        axes.barh(rows, values, height, color=_BARS[place % len(_BARS)], label=f"k = {top_k}")
    axes.axvline(STEPS_S, color="k", linestyle=":", label="goal, k = 0")
    axes.set_xscale("log")
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(names))], [_label(record, name) for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("steps/s of 256 rows x 3 tokens")
    axes.set_title("Flat out")
    axes.grid(alpha=0.3, axis="x")
    axes.legend(loc="lower right", fontsize="small")


def _scaling(axes: "Axes", record: Record) -> None:
    for axis, marker in zip(_AXES, "os", strict=True):
        mine = [each for each in record["scaling"] if each["axis"] == axis]
        values = [each["value"] for each in mine]
        axes.plot(values, [each["receiver_cpu_us_a_row"] for each in mine], marker=marker, label=f"over {axis}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(" or ".join(_AXES))
    axes.set_ylabel("processor time a row, microseconds")
    axes.set_title("The processor's cost a row")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")


def _memory(axes: "Axes", record: Record) -> None:
    for name, process in record["memory"]["processes"].items():
        steps, sizes = zip(*process["samples"], strict=True)
        axes.plot(steps, [size / 2**20 for size in sizes], label=name)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("steps")
    axes.set_ylabel("resident memory, MiB")
    axes.set_title("Memory, requests coming and going")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
