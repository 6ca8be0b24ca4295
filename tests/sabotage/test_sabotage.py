"""The tables of `make sabotage` and `make mutants` fit the sources and the tests; a test is told from none."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sabotage.table import ROOT, TABLE, faults, lines

_KILLED = """
[[line]]
claim = "A key has only the roles in its entry."
file = "services/tokenbus/bus/transport.py"
text = "return role in self.roles and ("
broken = "return ("
test = "tests/bus/test_allow_list.py::test_role_that_is_not_listed_is_not_had"
"""
_SURVIVES = _KILLED.replace("return (", "return role in set(self.roles) and (")
_INVALID = _KILLED.replace("return (", "return role of self.roles and (")


@pytest.mark.parametrize(("table", "least"), [(TABLE, 40), (ROOT / "tests/mutants/mutants.toml", 250)])
def test_table_fits_the_page_the_sources_and_the_tests(table: Path, least: int) -> None:
    found = lines(table)
    assert len(found) >= least
    assert [fault for line in found for fault in faults(line)] == []
    assert len({(line.file, line.text, line.test) for line in found}) == len(found)


def test_line_that_does_not_fit_is_named(tmp_path: Path) -> None:
    table = tmp_path / "lines.toml"
    table.write_text(
        _KILLED.replace("only the roles", "more roles than").replace("in self.roles", "of").replace("::test", "::x")
    )
    (line,) = lines(table)
    assert faults(line) == [
        "docs/security.md does not say: A key has more roles than in its entry.",
        "services/tokenbus/bus/transport.py: exactly once, got 0 times: return role of and (",
        "no such test: tests/bus/test_allow_list.py::x_role_that_is_not_listed_is_not_had",
    ]


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.sabotage", "--processes", "1", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.nightly
@pytest.mark.process
def test_broken_line_is_killed_by_a_test_that_fails(tmp_path: Path) -> None:
    table, results = tmp_path / "lines.toml", tmp_path / "results.json"
    table.write_text(_KILLED + _SURVIVES + _INVALID)
    run = _run("--table", table, "--json", results)
    assert run.returncode == 1, run.stdout + run.stderr
    assert [result["outcome"] for result in json.loads(results.read_text())] == ["killed", "survived", "invalid"]
    assert run.stdout.splitlines()[-1] == "3 lines broken, 2 survivors"
