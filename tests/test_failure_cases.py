"""What went wrong elsewhere stays covered: each case has a test whose docstring names its number."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
CASES = frozenset(range(1, 34))
PACKAGES = [TESTS.parent / name for name in ("contracts", "gpu_ops", "services")]

_CASES = re.compile(r"\(case ([0-9, ]+)\)")


def named_cases() -> set[int]:
    """Return the numbers that the docstrings of tests name."""
    found: set[int] = set()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for numbers in _CASES.findall(ast.get_docstring(node) or ""):
                    found |= {int(number) for number in numbers.split(",")}
    return found


def test_no_case_loses_its_test() -> None:
    """Every case has a test, and every number that is named is one of the list's."""
    found = named_cases()
    assert found >= CASES
    assert found <= CASES


def test_nothing_that_came_from_the_network_is_unpickled() -> None:
    """No module of the packages imports what rebuilds objects from bytes and runs code for that (case 32)."""
    for path in (path for package in PACKAGES for path in package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names.append(node.module)
            assert not {name.split(".")[0] for name in names} & {"pickle", "marshal", "shelve", "dill"}, path
