"""What comes from elsewhere: what is on the wire and on disk runs no code, and the locks are reported as they are."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT

PACKAGES = ("contracts/tokenbus_contracts", "gpu_ops/tokenbus_gpu_ops", "services/tokenbus")
_RUNS_CODE = re.compile(
    r"\b(?:_?pickle|cPickle|marshal|shelve|dill|joblib|cloudpickle|jsonpickle)\b"
    r"|\b(?:\w+_pyobj|read_pickle|allow_pickle|weights_only|open_memmap)\b"
    r"|\b(?:torch|paddle)\.load\b|import (?:torch|paddle) as|from (?:torch|paddle)\S* import .*\bload\b"
    r"|(?<![.\w])(?:eval|exec)\("
)
"""The names of what runs, or may run, what it reads; a framework has its own name, so that its reader is found."""


def _faults(path: Path) -> list[str]:
    return [f"{path.name}: {each[0]}" for each in _RUNS_CODE.finditer(path.read_text())]


def test_nothing_that_is_read_can_run_code() -> None:
    """No module of the packages can unpickle: not by import or name, by pyzmq, numpy or a framework (case 32)."""
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(modules) > 100
    assert [fault for path in modules for fault in _faults(path)] == []


def test_what_could_run_code_is_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    for text in (
        "import pickle",
        "def f():\n    from pickle import loads",
        "import importlib\nimportlib.import_module('pickle')",
        "__import__('marshal')",
        "socket.recv_pyobj()",
        "np.load(path, allow_pickle=wanted)",
        "import paddle as p\np.load(path)",
        "from torch.serialization import load",
        "eval(text)",
    ):
        path.write_text(text)
        assert _faults(path), text


@pytest.mark.nightly
def test_sbom_lists_what_the_locks_hold() -> None:
    said = []
    for _ in range(2):
        command = [sys.executable, str(ROOT / "requirements" / "supply.py"), "sbom"]
        subprocess.run(command, check=True, capture_output=True)
        said.append({path.name: path.read_text() for path in (ROOT / "build" / "sbom").glob("*.cdx.json")})
    assert said[0] == said[1]
    for lock in (ROOT / "requirements").glob("*.txt"):
        components = json.loads(said[0][f"{lock.stem}.cdx.json"])["components"]
        text = lock.read_text()
        assert len(components) == sum(not line.startswith(("#", " ")) for line in text.splitlines() if line)
        for each in components:
            assert f"{each['name']}==" in text.lower().replace("_", "-").replace(".", "-") or each["name"] in text
            assert each["externalReferences"][0]["hashes"]


def test_audit_that_cannot_ask_says_so_and_fails() -> None:
    command = [sys.executable, str(ROOT / "requirements" / "supply.py"), "audit"]
    run = subprocess.run(
        command, check=False, capture_output=True, text=True, env={"TOKENBUS_AUDIT_INDEX": "http://127.0.0.1:1"}
    )
    assert run.returncode == 2
    assert run.stderr.startswith("audit: not checked: ")
    assert run.stderr.count("\n") == 1
