"""Run all benchmarks into one page: `python -m benchmarks`."""

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

from benchmarks.page import page
from benchmarks.running import Benchmark, Result, chosen, find, measure
from tokenbus_services.cli.errors import WRONG_USE, CommandError
from tokenbus_services.printable import printable
from tokenbus_services.terminal import Progress, styled

ROOT = Path(__file__).resolve().parents[1]
_DESCRIPTION = """\
Run the benchmarks one after the other and write their tables and plots into one self-contained HTML page. A benchmark
that cannot run here, as without a GPU, is listed with the reason. Nothing under docs/ is changed: for that, each is run
by hand, on a quiet machine, with --write-docs.

The status is 0 if every benchmark measured something, 1 if one did not; goals that are missed do not change it.

examples:
  python -m benchmarks --list                  which benchmarks there are
  python -m benchmarks --quick                 whether all of them work, in a few minutes
  python -m benchmarks codec bus               two of them, in full
  python -m benchmarks --output bench.html --json > bench.json
"""
_OUTPUT = "tokenbus-bench.html"
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which benchmarks (default: all)")
    parser.add_argument("--quick", action="store_true", help="short runs with rough figures")
    parser.add_argument("--output", type=Path, default=Path(_OUTPUT), metavar="FILE", help=f"the page ({_OUTPUT})")
    parser.add_argument("--list", action="store_true", help="list the benchmarks, and run none")
    parser.add_argument("--json", action="store_true", help="print every figure as one JSON document")
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except CommandError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return _INTERRUPTED


def _run(options: argparse.Namespace) -> int:
    benchmarks = chosen(options.names, find(ROOT))
    if options.list:
        _list(benchmarks, as_json=options.json)
        return 0
    if not options.output.parent.is_dir() or options.output.is_dir():
        raise CommandError(f"--output: a file in a directory that exists, got {str(options.output)!r}", WRONG_USE)
    _refuse_what_cannot_be_written(options.output)
    results: list[Result] = []
    try:
        with _ended_by_signals():
            _measure(benchmarks, options, results)
    finally:
        if results:  # an interrupted run keeps what was measured before
            _write(options.output, results, quick=options.quick)
    if options.json:
        print(json.dumps([_values(result) for result in results], indent=2))
    else:
        print(f"the tables and plots are in {printable(str(options.output))}")
    return 0 if all(result.ran for result in results) else 1


def _measure(benchmarks: Sequence[Benchmark], options: argparse.Namespace, results: list[Result]) -> None:
    progress = Progress()
    for number, benchmark in enumerate(benchmarks, 1):
        begin = time.monotonic()
        head = f"[{number}/{len(benchmarks)}] {benchmark.name}"

        def show(line: str, head: str = head, begin: float = begin) -> None:
            """Show the latest line of a benchmark's own progress."""
            progress.show(lambda: f"{head}, {time.monotonic() - begin:.0f} s: {line[:80]}")

        show("starting")
        try:
            result = measure(benchmark, ROOT, quick=options.quick, on_line=show)
        finally:
            progress.clear()
        results.append(result)
        line = f"{head:20} {result.seconds:>5.0f} s  {result.verdict}"
        # With --json standard output is one document.
        print(line if result.ran else styled(line, "red"), file=sys.stderr if options.json else sys.stdout, flush=True)


def _refuse_what_cannot_be_written(path: Path) -> None:
    """Raise before the first benchmark runs, not after the last."""
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
    """Turn SIGTERM and SIGHUP into a KeyboardInterrupt, so that the running benchmark is stopped first."""

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


if __name__ == "__main__":
    sys.exit(main())
