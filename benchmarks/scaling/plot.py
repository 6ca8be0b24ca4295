"""A record as one figure: what was measured beside what the model says, and how busy each kind of process was."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.outputs import Record
from benchmarks.scaling.document import title

_WIDTH, _HEIGHT, _AROUND = 12.0, 0.26, 4
"""In inches: of the figure, and of each cell; and how many cells' height a run's labels take."""
_DPI = 110
_COLOURS = {"worker": "#e69f00", "processor": "#0072b2", "reader": "#009e73", "nats": "#cc79a7", "load": "#999999"}


def plot(record: Record, folder: Path) -> None:
    """Write scaling.png and scaling.svg into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # Text stays text and ids do not depend on the run, so that the same figures give the same, small, file.
    runs = record["runs"]
    heights = [len(run["cells"]) + _AROUND for run in runs]
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tokenbus", "font.size": 9}):
        figure = Figure(figsize=(_WIDTH, _HEIGHT * sum(heights)), dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        for run, (left, right) in zip(
            runs, figure.subplots(len(runs), 2, height_ratios=heights, squeeze=False), strict=True
        ):
            _draw(run, left, right)
        figure.savefig(folder / "scaling.svg", metadata={"Date": None, "Creator": None})
        figure.savefig(folder / "scaling.png", metadata={"Software": None})


def _draw(run: Record, left: Axes, right: Axes) -> None:
    """Draw one run: its steps a second, and how busy its processes were."""
    cells = run["cells"]
    places = range(len(cells))
    names = [f"{cell['workers']}/{cell['processors']}/{cell['readers']}" for cell in cells]
    left.barh(places, [cell["steps_per_second"] for cell in cells], color="#56b4e9", label="measured")
    left.plot([cell["predicted"] for cell in cells], places, "|", color="#d55e00", ms=14, mew=2, label="predicted")
    left.set_xlabel("steps/s, 256 rows x 3 tokens")
    for kind in run["model"]:
        busy = [100 * cell["busiest"][kind] for cell in cells]
        right.plot(busy, places, "o", color=_COLOURS[kind], label=kind)
    right.set_xlabel("the busiest process of each kind, % of a core")
    for axes in (left, right):
        axes.set_yticks(places, names)
        axes.invert_yaxis()
        axes.grid(alpha=0.3, axis="x")
        axes.legend(loc="lower right")
    left.set_ylabel("workers/processors/readers")
    left.set_title(title(run), loc="left")
