"""Measure the codec beside its peers: `python -m benchmarks.codec`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.codec.document import write_documents, write_json
from benchmarks.codec.plot import plot
from benchmarks.codec.record import run
from benchmarks.codec.tables import render
from benchmarks.paint import Paint

_COMMAND = "python -m benchmarks.codec --write-docs"
_DOCS = Path("docs/benchmarks")
_TURNS, _QUICK_TURNS = 100, 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codec", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few turns, and the goals' sizes alone")
    parser.add_argument("--turns", type=int, help=f"of the goals' sizes (default {_TURNS}); others get a quarter")
    parser.add_argument("--seed", type=int, default=1, help="of the random steps (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write codec.png and codec.svg")
    parser.add_argument(
        *("--write-docs",),
        type=Path,
        metavar="FOLDER",
        nargs="?",
        const=_DOCS,
        help=f"write the figures, the plot and a page (default {_DOCS})",
    )
    options = parser.parse_args(arguments)
    turns = options.turns or (_QUICK_TURNS if options.quick else _TURNS)
    if turns < 1:
        parser.error(f"--turns: at least 1, not {turns}")
    record = run(quick=options.quick, turns=turns, seed=options.seed, progress=_progress)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(render(record, Paint(colour=colour)))
    if options.json:
        write_json(record, options.json)
    if options.plot:
        plot(record, options.plot)
    if options.write_docs:
        write_documents(record, options.write_docs, _COMMAND)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
