"""Which tests hold which failure case, by the numbers in their docstrings; run, it updates docs/failure-cases.md."""

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "failure-cases.md"
_CITED = re.compile(r"\(case ([0-9, ]+)\)")
_ROW = re.compile(r"^\| (\d+) \|((?:[^|\n]*\|){3})[^|\n]*\|$", re.MULTILINE)


def cited() -> dict[int, list[str]]:
    """Return the test modules that cite each case, as paths below tests/."""
    found: defaultdict[int, set[str]] = defaultdict(set)
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for numbers in _CITED.findall(ast.get_docstring(node) or ""):
                    for number in numbers.split(","):
                        found[int(number)].add(path.relative_to(TESTS).as_posix())
    return {number: sorted(paths) for number, paths in found.items()}


def listed(page: str) -> list[int]:
    """Return the numbers of the cases that the page lists, in its order."""
    return [int(number) for number, _ in _ROW.findall(page)]


def with_tests(page: str) -> str:
    """Return the page with the modules that hold each case in its last column."""
    modules = cited()
    return _ROW.sub(lambda row: f"| {row[1]} |{row[2]} {', '.join(modules.get(int(row[1]), []))} |", page)


if __name__ == "__main__":
    PAGE.write_text(with_tests(PAGE.read_text()))
