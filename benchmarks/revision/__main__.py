"""Measure the codec and the bus beside another revision's: `python -m benchmarks.revision`.

The other revision is installed from this repository's history, and each of the two runs in a process of its own. They
do the same work in turn, in short rounds; times are the processor's, medians of all rounds, and so are ratios, of each
round.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.errors import NotRunError
from benchmarks.report import Report, Row, progress
from benchmarks.revision.order import ROOT, BusOrder, CodecOrder, Revision
from benchmarks.workload import HEADLINE_ROWS, HEADLINE_TOKENS

_CASES = (
    CodecOrder(HEADLINE_ROWS, HEADLINE_TOKENS, None),
    CodecOrder(HEADLINE_ROWS, HEADLINE_TOKENS, 0),
    CodecOrder(HEADLINE_ROWS, HEADLINE_TOKENS, 20),
    CodecOrder(1, HEADLINE_TOKENS, 20),
    CodecOrder(1, 1, None),
)
_OPERATIONS = ("make", "encode", "decode", "decode and read", "select")
_CALLS = {1: 1000, HEADLINE_ROWS: 100}
"""Of a round, by rows: ten milliseconds or so."""


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("revision", __doc__)
    add = report.parser.add_argument
    add("revision", nargs="?", default="HEAD~1", help="of this repository (the parent)")
    add("--rounds", type=int, default=60, metavar="N", help="of each line of the codec (60)")
    add("--bus-rounds", type=int, default=9, metavar="N", help="of each line of the bus (9)")
    add("--steps", type=int, default=1000, metavar="N", help="of a round of the bus (1000)")
    options = report.parse(arguments)
    if options.quick:
        options.rounds, options.bus_rounds, options.steps = 2, 1, 20
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenbus-bench-"))
        try:
            _install(options.revision, Path(folder))
        except subprocess.CalledProcessError as error:
            report.fail(RuntimeError(f"revision: one that can be installed, got {options.revision}: {error.stderr}"))
        this, other = (stack.enter_context(Revision(packages)) for packages in (None, Path(folder, "packages")))
        try:
            lines = [_codec(this, other, case, what, options.rounds) for case in _CASES for what in _OPERATIONS]
            report.table(lines, "the codec: microseconds of a call")
            orders = [BusOrder(top_k, options.steps) for top_k in (0, 20)]
            lines = [line for order in orders for line in _bus(this, other, order, options.bus_rounds)]
            report.table(lines, "the bus: microseconds of a step")
        except NotRunError as error:
            report.say(f"{error}.")
    report.write()


def _codec(this: Revision, other: Revision, case: CodecOrder, what: str, rounds: int) -> Row:
    progress(f"{case.name}: {what}")
    order = case._replace(operation=what, calls=_CALLS[case.rows])
    times = _in_turn([(this, order), (other, order)], rounds)
    return {"": case.name, "what": what, **_beside(*times)}


def _bus(this: Revision, other: Revision, order: BusOrder, rounds: int) -> list[Row]:
    progress(f"bus, k = {order.top_k}")
    pairs = _in_turn([(this, order), (other, order)], rounds)
    sides = zip(*(zip(*each, strict=True) for each in pairs), strict=True)
    names = (f"{side}, k = {order.top_k}" for side in ("to send", "to receive"))
    return [{"what": name, **_beside(*times)} for name, times in zip(names, sides, strict=True)]


def _in_turn(turns: Sequence[tuple[Revision, CodecOrder | BusOrder]], rounds: int) -> list[list[Any]]:
    """Return what each one took in each round; the first round, which finds nothing warm, does not count."""
    taken: list[list[Any]] = [[] for _ in turns]
    for number in range(rounds + 1):
        places = range(len(turns)) if number % 2 else reversed(range(len(turns)))
        for place in places:
            revision, order = turns[place]
            found = revision.take(order)
            if number:
                taken[place].append(found)
    return taken


def _beside(this: Sequence[float], other: Sequence[float]) -> Row:
    return {"this tree": median(this), "the other": median(other), "ratio": _ratio(this, other)}


def _ratio(these: Sequence[float], others: Sequence[float]) -> str:
    return f"{median(this / other for this, other in zip(these, others, strict=True)):.3f}"


def _install(revision: str, folder: Path) -> None:
    """Install a revision's packages as pip installs them, with what is compiled."""
    source = folder / "source"
    source.mkdir()
    git = ["git", "-C", str(ROOT), "archive", revision]
    archive = subprocess.run(git, check=True, capture_output=True).stdout
    unpack = ["tar", "-x", "-C", str(source)]
    subprocess.run(unpack, input=archive, check=True, capture_output=True)
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target"]
    subprocess.run([sys.executable, *install, folder / "packages", source], check=True, capture_output=True)


if __name__ == "__main__":
    main()
