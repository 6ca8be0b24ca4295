"""What fails is run once more, alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT

FLAKY = """
def test_flaky():
    from pathlib import Path
    mark = Path("ran")
    if not mark.exists():
        mark.touch()
        raise AssertionError
"""
GROUPED = "import pytest\n@pytest.mark.xdist_group('one')" + FLAKY
PASSES, FAILS = "def test_passes(): pass\n", "def test_fails(): assert False\n"
BROKEN = "import no_such_module\n"


@pytest.mark.parametrize(
    ("tests", "status", "says"),
    [
        (PASSES, 0, []),
        (PASSES + FLAKY, 0, ["FLAKY test_it.py::test_flaky"]),
        (PASSES + FAILS, 1, ["FAILED TWICE test_it.py::test_fails"]),
        (GROUPED + PASSES, 0, ["FLAKY test_it.py::test_flaky"]),
        (FAILS + FLAKY, 1, ["FLAKY test_it.py::test_flaky", "FAILED TWICE test_it.py::test_fails"]),
        (BROKEN, 2, ["FAILED TWICE test_it.py"]),
    ],
)
def test_what_fails_is_run_once_more(tests: str, status: int, says: list[str], tmp_path: Path) -> None:
    """A test that passes when it runs again is named, one that fails twice fails the run, and so does a broken one."""
    (tmp_path / "test_it.py").write_text(tests)
    found = again(tmp_path, status, "-n", "1", "--dist", "loadgroup", "-p", "xdist")
    assert len(found) == len(says)
    assert all(line.startswith(said) for line, said in zip(found, says, strict=True)), found


def test_pytest_without_xdist(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(PASSES + FLAKY)
    (line,) = again(tmp_path, 0)
    assert line.startswith("FLAKY test_it.py::test_flaky")


def again(folder: Path, status: int, *arguments: str) -> list[str]:
    """Run the tests of a folder, and return what is said of those that failed."""
    command = [sys.executable, "-m", "tests.again", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == status, run.stdout
    return [line for line in run.stdout.splitlines() if line.startswith(("FLAKY", "FAILED TWICE"))]
