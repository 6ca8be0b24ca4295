"""CONTRIBUTING.md says how each guarantee is proven: the tests that it names are there, and run in `make test`."""

import ast
import re
from pathlib import Path

import pytest

from tests.pages import ROOT
from tests.support.alone import marks_of

_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_ROWS = [
    row.strip("|").split("|")
    for row in (ROOT / "CONTRIBUTING.md").read_text().partition("## The guarantees")[2].split("\n## ")[0].splitlines()
    if _TEST.search(row)
]
GUARANTEES = 7


def marks(path: Path, name: str) -> set[str]:
    """Return the marks of a test: those of its place, of its module and its own; fail if there is no such test."""
    tree = ast.parse(path.read_text())
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    (found,) = [node for node in tests if node.name == name]
    others = [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    own = " ".join(map(ast.unparse, [*found.decorator_list, *others]))
    return {*marks_of(path), *re.findall(r"pytest\.mark\.(\w+)", own)}


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: row[0].strip()[:40])
def test_guarantee_has_its_proofs(row: list[str]) -> None:
    """The cheapest proofs start no process, those over real processes do, and none of them runs at night alone."""
    _, cheapest, real = (_TEST.findall(cell) for cell in row)
    assert cheapest
    assert real
    for tests, starts in ((cheapest, False), (real, True)):
        for path, name in tests:
            found = marks(ROOT / path, name)
            assert "nightly" not in found
            assert ("process" in found) is starts, name


def test_each_guarantee_is_named() -> None:
    assert len(_ROWS) == GUARANTEES
