"""Break each line that makes a claim of docs/security.md true: `python -m tests.sabotage [TEXT ...]`.

Each line of lines.toml is broken in a scratch copy, alone, and the test that the table names must fail there. A line
that no test misses is a survivor. Ends with 0 where there is none, 1 where there are some, and 2 where the table
does not fit the tree or its tests fail on unbroken code.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue

from tests.sabotage.copies import Copy, Outcome, Result
from tests.sabotage.table import TABLE, Line, faults, lines
from tests.support import orphans


def main() -> int:
    """Break what the command line selects, say what became of it, and return the exit status."""
    given = _arguments()
    chosen = [line for line in lines(given.table) if any(text in f"{line} {line.test}" for text in given.texts or [""])]
    if found := [fault for line in chosen for fault in faults(line)]:
        print(*found, sep="\n", file=sys.stderr)
        return 2
    if not chosen:
        print(f"no line of the table has one of these: {given.texts}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="tokenbus-sabotage-") as folder:
        copies = [Copy(Path(folder, str(number)), given.seconds) for number in range(given.processes)]
        if fault := _fault_unbroken(copies, chosen):
            print(f"unbroken, the tests fail:\n{fault}", file=sys.stderr)
            return 2
        results = []
        for result in _break_all(copies, chosen):
            results.append(result)
            print(f"{result.outcome:8} {result.seconds:5.1f} s  {result.line}", flush=True)
    survivors = [each for each in results if each.outcome is not Outcome.KILLED]
    for each in survivors:
        print(f"\n{each.outcome}: {each.line.file}: {each.line.text}\n{each.line.test}\n{each.printed}")
    print(f"{len(results)} lines broken, {len(survivors)} survivors")
    if given.json:
        given.json.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
    return int(bool(survivors))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sabotage", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument(
        "texts", nargs="*", metavar="TEXT", help="only lines whose file, claim or test has one of these"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--processes", type=int, default=2, help="how many lines are broken at a time (default: 2)")
    parser.add_argument("--seconds", type=float, default=180.0, help="the longest that a test may take (default: 180)")
    parser.add_argument("--table", type=Path, default=TABLE, help="another table")
    return parser.parse_args()


def _fault_unbroken(copies: list[Copy], chosen: list[Line]) -> str:
    tests = sorted({test for line in chosen for test in line.test.split()})
    shares = [tests[place :: len(copies)] for place in range(len(copies))]
    with ThreadPoolExecutor(len(copies)) as pool:
        return "\n".join(filter(None, pool.map(Copy.failures, copies, shares)))


def _break_all(copies: list[Copy], chosen: list[Line]) -> Iterator[Result]:
    """Yield what became of each line, in the table's order, as many at a time as there are copies."""
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def run(line: Line) -> Result:
        copy = free.get()
        try:
            return copy.broken(line)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        yield from pool.map(run, chosen)


if __name__ == "__main__":
    orphans.end_with_this_process()
    sys.exit(main())
