"""Measure the way from logits to columns: `python -m benchmarks.gpu_ops`."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_ops.document import write_documents, write_json
from benchmarks.gpu_ops.plot import plot
from benchmarks.gpu_ops.record import run
from benchmarks.gpu_ops.tables import render
from benchmarks.paint import Paint

_COMMAND = "python -m benchmarks.gpu_ops --write-docs"
_DOCS = Path("docs/benchmarks")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_ops", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few sizes")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="measure nothing, take the figures of an earlier run"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write gpu-ops.png and gpu-ops.svg")
    parser.add_argument(
        *("--write-docs",),
        type=Path,
        metavar="FOLDER",
        nargs="?",
        const=_DOCS,
        help=f"write the figures, the plot and a page (default {_DOCS})",
    )
    options = parser.parse_args(arguments)
    record = json.loads(options.record.read_text()) if options.record else run(quick=options.quick, progress=_progress)
    if options.json:
        write_json(record, options.json)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(render(record, Paint(colour=colour)))
    if isinstance(record["card"], str):
        if options.plot or options.write_docs:
            parser.error(f"nothing to draw: {record['card']}")
        return
    if options.plot:
        plot(record, options.plot)
    if options.write_docs:
        write_documents(record, options.write_docs, _COMMAND)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
