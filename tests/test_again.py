"""What fails is run once more, alone."""

import os
import subprocess
import sys
from pathlib import Path

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


def test_what_fails_is_run_once_more(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_fails(): assert False\n" + GROUPED)
    flaky, twice = again(tmp_path, 1, "-n", "1", "--dist", "loadgroup", "-p", "xdist")
    assert flaky.startswith("FLAKY test_it.py::test_flaky")
    assert twice.startswith("FAILED TWICE test_it.py::test_fails")


def test_flaky_test_fails_no_run(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_passes(): pass\n" + FLAKY)
    (flaky,) = again(tmp_path, 0)
    assert flaky.startswith("FLAKY test_it.py::test_flaky")


def again(folder: Path, status: int, *arguments: str) -> list[str]:
    command = [sys.executable, "-m", "tests.again", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == status, run.stdout
    return [line for line in run.stdout.splitlines() if line.startswith(("FLAKY", "FAILED TWICE"))]
