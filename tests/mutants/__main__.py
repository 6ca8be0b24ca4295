"""Draw faults of the core anew, and write the tests that notice each into mutants.toml: `python -m tests.mutants FILE`.

FILE is what coverage measured of the tests that may be chosen:

    coverage run --data-file FILE -m pytest -p tests.mutants.contexts -m "not process and not long"

Of the tests that run a mutant's line, those that run the fewest lines are tried. A mutant that none of them notices is
not written: it may be the same program. `make mutants` repeats what is written.
"""

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from coverage import CoverageData

from tests.mutants.draw import Mutant, draw
from tests.sabotage.copies import Copy, Outcome
from tests.sabotage.table import ROOT, Line
from tests.support import orphans

TABLE = Path(__file__).with_name("mutants.toml")
_ABOUT = """\
# Faults of the core that tests notice, drawn by seed {seed} (`python -m tests.mutants`). `make mutants` makes them one
# at a time in a scratch copy: one of the tests must fail there. Remove a mutant only with its code; a test
# that is deleted leaves another one that notices.
"""


class Covering:
    """Which tests run a line, by what coverage has measured."""

    def __init__(self, path: Path) -> None:
        """Read what was measured; raises SystemExit if no test is named in it."""
        self._data = CoverageData(str(path))
        self._data.read()
        self._files = {Path(name).relative_to(ROOT).as_posix(): name for name in self._data.measured_files()}
        self._lines: Counter[str] = Counter()
        for name in self._files.values():
            for tests in self._data.contexts_by_lineno(name).values():
                self._lines.update(tests)
        if not any(self._lines):
            raise SystemExit(f"{path}: no line is attributed to a test; was it measured with tests.mutants.contexts?")

    def tests(self, mutant: Mutant, most: int) -> list[str]:
        by_line = self._data.contexts_by_lineno(self._files.get(mutant.file, ""))
        return sorted(filter(None, by_line.get(mutant.number, [])), key=lambda test: (self._lines[test], test))[:most]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("coverage", type=Path, help="the data file of coverage")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=450, help="how many are drawn; a test notices some two thirds")
    parser.add_argument("--most", type=int, default=12, help="how many tests are tried for each (default: 12)")
    parser.add_argument("--processes", type=int, default=2, help="how many mutants are tried at a time (default: 2)")
    given = parser.parse_args()
    covering = Covering(given.coverage)
    chosen = [(mutant, covering.tests(mutant, given.most)) for mutant in draw(given.seed, given.count)]
    noticed: list[Line] = []
    with TABLE.open("w") as table:
        table.write(_ABOUT.format(seed=given.seed))
        for place, line in enumerate(_noticed([each for each in chosen if each[1]], given.processes), 1):
            print(f"{place}: {line.file}: {line.test or 'no test notices'}", flush=True)
            if line.test:
                noticed.append(line)
                table.write(_entry(line))
                table.flush()
    print(f"{len(chosen)} drawn, {sum(not tests for _, tests in chosen)} run by no test, {len(noticed)} noticed")
    return 0


def _noticed(chosen: list[tuple[Mutant, list[str]]], processes: int) -> Iterator[Line]:
    """Make each mutant and run its tests; yield it with those that failed, in order."""
    free: SimpleQueue[Copy] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="tokenbus-mutants-") as folder:
        for number in range(processes):
            free.put(Copy(Path(folder, str(number)), 90.0, ("--timeout", "20", "-rf")))

        def run(each: tuple[Mutant, list[str]]) -> Line:
            mutant, tests = each
            copy = free.get()
            try:
                line = Line(file=mutant.file, text=mutant.text, broken=mutant.broken, test=" ".join(tests))
                result = copy.broken(line)
            finally:
                free.put(copy)
            failed = dict.fromkeys(re.findall(r"^FAILED ([^\s\[]+)", result.printed, re.MULTILINE))
            killers = " ".join(list(failed)[:3]) if result.outcome is Outcome.KILLED else ""
            return Line(file=mutant.file, text=mutant.text, broken=mutant.broken, test=killers)

        with ThreadPoolExecutor(processes) as pool:
            yield from pool.map(run, chosen)


def _entry(line: Line) -> str:
    fields = {"file": line.file, "text": line.text, "broken": line.broken, "test": line.test}
    return "\n[[line]]\n" + "".join(f"{name} = {_quoted(value)}\n" for name, value in fields.items())


def _quoted(text: str) -> str:
    """Return a text as TOML: literal where that is possible, since sources have backslashes."""
    if "'''" in text or text.endswith("'"):
        escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    return f"'''\n{text}'''" if "\n" in text or "'" in text else f"'{text}'"


if __name__ == "__main__":
    orphans.end_with_this_process()
    sys.exit(main())
