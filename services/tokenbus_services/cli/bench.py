"""tokenbus bench: every benchmark that this machine can run, into one page."""

import argparse
import contextlib
import datetime as dt
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

from tokenbus_services.cli.benching.finding import Benchmark, checkout, chosen, find
from tokenbus_services.cli.benching.page import page
from tokenbus_services.cli.benching.running import Result, measure
from tokenbus_services.cli.errors import WRONG_USE, CommandError
from tokenbus_services.cli.progress import Progress
from tokenbus_services.cli.terminal import styled
from tokenbus_services.printable import printable

_DESCRIPTION = """\
Run the benchmarks one after the other and write their tables and plots into one HTML page, which needs nothing else to
be read. Each says itself what it needs; what cannot run here, as without a GPU, is named with the reason. Nothing under
docs/ is changed: for that, each is run by hand, on a quiet machine, with --write-docs.

The benchmarks lie beside the packages in the source repository and are not installed with them.

The status is 0 if every one had something to show, 1 if one did not; goals that are missed do not change it.

examples:
  tokenbus bench --list                  what there is
  tokenbus bench --quick                 whether all of them work, in a few minutes
  tokenbus bench codec bus               two of them, in full
  tokenbus bench --output bench.html --json > bench.json
"""
_OUTPUT = "tokenbus-bench.html"


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.add_argument("files", nargs="*", metavar="NAME", help="which benchmarks (default: all)")
    parser.add_argument("--quick", action="store_true", help="short runs with rough figures")
    parser.add_argument("--output", type=Path, default=Path(_OUTPUT), metavar="FILE", help=f"the page ({_OUTPUT})")
    parser.add_argument("--list", action="store_true", help="say which benchmarks there are, and run none")
    parser.add_argument("--json", action="store_true", help="print every figure as one JSON document")


def run(options: argparse.Namespace) -> int:
    """Run them; return 1 if one had nothing to show."""
    root = checkout()
    benchmarks = chosen(options.files, find(root))
    if options.list:
        _list(benchmarks, as_json=options.json)
        return 0
    if not options.output.parent.is_dir() or options.output.is_dir():
        raise CommandError(f"--output: a file in a directory that exists, got {str(options.output)!r}", WRONG_USE)
    _refuse_what_cannot_be_written(options.output)
    results: list[Result] = []
    try:
        with _ended_by_signals():
            _measure(benchmarks, root, options, results)
    finally:
        if results:  # who breaks it off keeps what was measured before
            _write(options.output, results, quick=options.quick)
    if options.json:
        print(json.dumps([_values(result) for result in results], indent=2))
    else:
        print(f"the tables and plots are in {printable(str(options.output))}")
    return 0 if all(result.ran for result in results) else 1


def _measure(benchmarks: Sequence[Benchmark], root: Path, options: argparse.Namespace, results: list[Result]) -> None:
    progress = Progress()
    for number, benchmark in enumerate(benchmarks, 1):
        begin = time.monotonic()
        head = f"[{number}/{len(benchmarks)}] {benchmark.name}"

        def show(line: str, head: str = head, begin: float = begin) -> None:
            """Show the latest line of a benchmark's own progress."""
            progress.show(lambda: f"{head}, {time.monotonic() - begin:.0f} s: {line[:80]}")

        show("starting")
        try:
            result = measure(benchmark, root, quick=options.quick, on_line=show)
        finally:
            progress.clear()
        results.append(result)
        line = f"{head:20} {result.seconds:>5.0f} s  {result.verdict}"
        _tell(line if result.ran else styled(line, "red"), is_output=not options.json)


def _tell(line: str, *, is_output: bool) -> None:
    """Tell how one went; where standard output is for machines, on standard error."""
    if is_output:
        print(line, flush=True)
    elif sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)


def _refuse_what_cannot_be_written(path: Path) -> None:
    """Find out before the first benchmark runs, not after the last."""
    is_new = not path.exists()
    try:
        with path.open("a"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise CommandError(
            printable(f"--output: {path}: {(error.strerror or str(error)).lower()}"), WRONG_USE
        ) from None


def _write(path: Path, results: Sequence[Result], *, quick: bool) -> None:
    made = dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
    text = page(results, quick=quick, made=made, version=version("tokenbus"))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(printable(f"{path}: {(error.strerror or str(error)).lower()}")) from None


def _list(benchmarks: Sequence[Benchmark], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([{"name": each.name, "title": each.title} for each in benchmarks], indent=2))
        return
    width = max(len(each.name) for each in benchmarks)
    for each in benchmarks:
        print(f"{each.name:{width}}  {each.title}")


def _values(result: Result) -> dict[str, Any]:
    return {
        "name": result.benchmark.name,
        "title": result.benchmark.title,
        "ran": result.ran,
        "status": result.status,
        "seconds": round(result.seconds, 1),
        "verdict": result.verdict,
        "trouble": result.trouble or None,
        "report": result.report,
        "record": result.record,
    }


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and the end of the terminal end this as Ctrl-C does: with what was started stopped first."""

    def end(_number: int, _frame: FrameType | None) -> None:
        """Leave."""
        raise KeyboardInterrupt

    heard = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, end) for each in heard}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
