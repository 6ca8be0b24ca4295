"""What went wrong elsewhere stays covered: each case has a test whose docstring cites its number."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
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
