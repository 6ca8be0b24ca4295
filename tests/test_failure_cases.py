"""What went wrong elsewhere stays covered: each case has a test whose docstring cites its number."""

import ast
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
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for numbers in re.findall(r"\(case ([0-9, ]+)\)", ast.get_docstring(node) or ""):
                    cited.update(map(int, numbers.split(",")))
    assert cited == set(cases)


def test_nothing_that_came_from_the_network_is_unpickled() -> None:
    """No module of the packages imports what rebuilds objects from bytes and runs code for that (case 32)."""
    for path in (path for package in PACKAGES for path in package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names.append(node.module)
            assert not {name.split(".")[0] for name in names} & {"pickle", "marshal", "shelve", "dill"}, path
