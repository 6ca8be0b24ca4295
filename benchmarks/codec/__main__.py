"""Measure the codec beside its peers: `python -m benchmarks.codec`."""

import argparse
from collections.abc import Sequence
from importlib.util import find_spec

from benchmarks.codec.document import page
from benchmarks.codec.plot import plot
from benchmarks.codec.record import run
from benchmarks.codec.tables import render
from benchmarks.outputs import DOCS, declare_outputs, paint, progress, write_outputs

_COMMAND = "python -m benchmarks.codec --write-docs"
_TURNS, _QUICK_TURNS = 100, 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codec", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few turns, and the goals' sizes alone")
    parser.add_argument("--turns", type=int, help=f"of the goals' sizes (default {_TURNS}); others get a quarter")
    parser.add_argument("--seed", type=int, default=1, help="of the random steps (default 1)")
    declare_outputs(parser, "codec", has_plot=True)
    options = parser.parse_args(arguments)
    turns = options.turns or (_QUICK_TURNS if options.quick else _TURNS)
    if turns < 1:
        parser.error(f"--turns: at least 1, not {turns}")
    if options.write_docs == DOCS and find_spec("vllm") is None:
        parser.error("--write-docs: vLLM is not installed, so its lines would be lost; the page names an environment")
    record = run(quick=options.quick, turns=turns, seed=options.seed, progress=progress)
    print(render(record, paint()))
    write_outputs(options, "codec", record, lambda: page(record, _COMMAND), plot)


if __name__ == "__main__":
    main()
