"""What went wrong elsewhere stays covered: each case has a test whose docstring cites its number."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PACKAGES = [TESTS.parent / name for name in ("contracts", "gpu_ops", "services")]
PAGE = TESTS.parent / "docs" / "failure-cases.md"


def test_no_case_loses_its_test() -> None:
    """Every case of docs/failure-cases.md has a test, and every number that a test cites is a case of that page."""
    cases = [int(number) for number in re.findall(r"^\| (\d+) \|", PAGE.read_text(), re.MULTILINE)]
    assert cases == list(range(1, len(cases) + 1))
    cited: set[int] = set()
    for path in TESTS.rglob("test_*.py"):
        for numbers in re.findall(r"\(case ([0-9, ]+)\)", path.read_text()):
            cited.update(map(int, numbers.split(",")))
    assert cited == set(cases)


def test_nothing_that_came_from_the_network_is_unpickled() -> None:
    """No module of the packages imports what rebuilds objects from bytes and runs code for that (case 32)."""
    unpickles = re.compile(r"^\s*(import|from)\s.*\b(pickle|marshal|shelve|dill)\b", re.MULTILINE)
    for path in (path for package in PACKAGES for path in package.rglob("*.py")):
        assert not unpickles.search(path.read_text()), path
