"""What every benchmark's command has: its progress, its colours, and the files that it writes beside what it prints."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.paint import Paint

Record = dict[str, Any]
"""A run: what the JSON file holds, and what the tables, the figure and the page are made of."""
Plot = Callable[[Record, Path], None]

DOCS = Path("docs/benchmarks")
"""Where the pages are that a release shows."""


def declare_outputs(parser: argparse.ArgumentParser, name: str, *, has_plot: bool) -> None:
    """Declare the options that say what is written, each file under the benchmark's name."""
    written = "the figures, the plot and a page" if has_plot else "the figures and a page"
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    if has_plot:
        parser.add_argument("--plot", type=Path, metavar="FOLDER", help=f"write {name}.png and {name}.svg")
    parser.add_argument(
        *("--write-docs",),
        type=Path,
        metavar="FOLDER",
        nargs="?",
        const=DOCS,
        help=f"write {written} (default {DOCS})",
    )


def write_outputs(
    options: argparse.Namespace, name: str, record: Record, page: Callable[[], str], plot: Plot | None = None
) -> None:
    """Write what the options ask for: the record, its plot, and both with its page."""
    folder = options.write_docs
    if options.json:
        write_json(record, options.json)
    if plot is not None and options.plot:
        plot(record, options.plot)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(record, folder / f"{name}.json")
        if plot is not None:
            plot(record, folder)
        (folder / f"{name}.md").write_text(page())


def write_json(record: Record, path: Path) -> None:
    """Write every figure."""
    path.write_text(json.dumps(record, indent=1) + "\n")


def progress(text: str) -> None:
    """Say what is being measured."""
    print(text, file=sys.stderr, flush=True)


def paint() -> Paint:
    """Return colours if standard output shows them."""
    return Paint(colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ)
