"""The table in lines.toml: what docs/security.md claims, the line that makes it true, and the test that must notice.

tests/mutants/mutants.toml has the same form: lines of the core without claims, and more than one test.
"""

import ast
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path("docs/security.md")
TABLE = Path(__file__).with_name("lines.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line that is broken."""

    claim: str = ""
    """Words of the page, exactly, where line breaks are spaces."""
    file: str
    """The source, from the root of the repository."""
    text: str
    """What makes the claim true; it occurs in the source exactly once."""
    broken: str
    """What it is replaced by: a program that still starts, and does not keep the claim."""
    test: str
    """The test that must fail then, as pytest names it; of several, with spaces between, one must."""

    def __str__(self) -> str:
        return f"{self.file}: {self.claim}"


def lines(path: Path = TABLE) -> list[Line]:
    """Return the table's lines; a field that is missing or unknown raises TypeError."""
    return [Line(**entry) for entry in tomllib.loads(path.read_text())["line"]]


def faults(line: Line, root: Path = ROOT) -> list[str]:
    """Return why a line of the table cannot be used: the page, the source or the tests have changed."""
    found = []
    if line.claim not in " ".join((root / PAGE).read_text().split()):
        found.append(f"{PAGE} does not say: {line.claim}")
    source = root / line.file
    count = source.read_text().count(line.text) if source.is_file() else 0
    if count != 1:
        found.append(f"{line.file}: exactly once, got {count} times: {line.text}")
    if line.text == line.broken:
        found.append(f"{line.file}: broken is the text itself: {line.text}")
    found += [f"no such test: {test}" for test in line.test.split() if not _exists(root, test)]
    return found


def _exists(root: Path, test: str) -> bool:
    file, _, name = test.partition("::")
    return name.partition("[")[0] in _functions(root / file)


@cache
def _functions(path: Path) -> frozenset[str]:
    if not path.is_file():
        return frozenset()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.parse(path.read_text()).body if isinstance(node, functions))
