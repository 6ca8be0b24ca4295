"""The services in examples/ are what they say: their own tests pass, with nothing but what is public here."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT

EXAMPLES = ROOT / "examples"
SERVICES = ("worker", "consumer", "trainer")


@pytest.mark.parametrize("name", ["worker", *(pytest.param(name, marks=pytest.mark.nightly) for name in SERVICES[1:])])
def test_their_tests_pass(name: str, tmp_path: Path) -> None:
    """As in a repository of their own, with pytest-asyncio's strict mode; warnings of ours are errors there."""
    options = ["-c", str(EXAMPLES / "pytest.ini"), "-W", "error", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
    command = [sys.executable, "-m", "pytest", "-q", *options, "--rootdir", str(EXAMPLES / name), str(EXAMPLES / name)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/*.py")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_they_use_what_is_public(path: Path) -> None:
    """They import tokenbus and its testing alone, sleep nowhere, and name no port."""
    text = path.read_text()
    imported = set(re.findall(r"^ *(?:from|import) ([\w.]+)", text, re.MULTILINE))
    own = {each.stem for each in path.parent.glob("*.py")}
    assert imported <= {*sys.stdlib_module_names, "collections.abc", "numpy", "pytest", "tokenbus", *own}
    assert "sleep(" not in text
    assert "127.0.0.1" not in text
