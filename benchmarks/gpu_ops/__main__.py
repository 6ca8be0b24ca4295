"""Measure the way from logits to columns: `python -m benchmarks.gpu_ops`."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_ops.document import page
from benchmarks.gpu_ops.plot import plot
from benchmarks.gpu_ops.record import run
from benchmarks.gpu_ops.tables import render
from benchmarks.outputs import declare_outputs, paint, progress, write_json, write_outputs

_COMMAND = "python -m benchmarks.gpu_ops --write-docs"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_ops", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few sizes")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="measure nothing, take the figures of an earlier run"
    )
    declare_outputs(parser, "gpu-ops", has_plot=True)
    options = parser.parse_args(arguments)
    record = json.loads(options.record.read_text()) if options.record else run(quick=options.quick, progress=progress)
    print(render(record, paint()))
    if isinstance(record["card"], str):
        if options.json:
            write_json(record, options.json)
        if options.plot or options.write_docs:
            parser.error(f"nothing to draw: {record['card']}")
        return
    write_outputs(options, "gpu-ops", record, lambda: page(record, _COMMAND), plot)


if __name__ == "__main__":
    main()
