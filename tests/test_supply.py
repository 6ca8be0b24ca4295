"""What comes from elsewhere: what is on the wire and on disk runs no code, and the locks are reported as they are."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import ROOT

PACKAGES = (
    "contracts/tokenbus_contracts",
    "gpu_ops/tokenbus_gpu_ops",
    "services/tokenbus",
)
RUN_CODE = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "joblib", "cloudpickle", "jsonpickle", "torch"}
"""Modules whose readers run, or may run, what they read."""
READERS = {"load", "loads", "open_memmap"}


def _modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def _faults(path: Path) -> Iterator[str]:
    """Yield what in a module could read bytes as code: imports, by whatever way, names, and arguments."""
    for node in ast.walk(ast.parse(path.read_text())):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").split(".")[0]]
        elif isinstance(node, ast.Constant) and node.value in RUN_CODE - {"torch"}:
            names = [str(node.value)]  # as importlib and __import__ would be given it
        elif isinstance(node, ast.Attribute) and node.attr in {"send_pyobj", "recv_pyobj", "read_pickle"}:
            names, where = ["pickle"], f"{where} {node.attr}"
        elif isinstance(node, ast.keyword) and node.arg in {"allow_pickle", "weights_only"}:
            allows = not (isinstance(node.value, ast.Constant) and node.value.value is (node.arg == "weights_only"))
            names = ["pickle"] if allows else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}:
            names, where = ["pickle"], f"{where} {node.func.id}"
        else:
            continue
        for name in RUN_CODE.intersection(names):
            yield f"{where}: {name}"


def _loads_of_torch(path: Path) -> Iterator[str]:
    """Yield the calls of torch.load and its like, by any name that torch was given."""
    tree = ast.parse(path.read_text())
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.split(".")[0] in {"torch", "paddle"}
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr not in READERS:
            continue
        if isinstance(node.value, ast.Name) and node.value.id in names:
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.value.id}.{node.attr}"


def test_nothing_that_is_read_can_run_code() -> None:
    """No module of the packages can unpickle: not by import or name, nor by pyzmq, by numpy or by a framework."""
    modules = _modules()
    assert len(modules) > 100
    found = [fault for path in modules for fault in (*_faults(path), *_loads_of_torch(path))]
    # A bridge to the framework hands arrays over in memory; it reads nothing.
    assert [fault for fault in found if not fault.endswith(": torch")] == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import importlib\nimportlib.import_module('pickle')",
        "__import__('marshal')",
        "socket.recv_pyobj()",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=wanted)",
        "import torch as t\nt.load(path)",
        "import paddle\npaddle.load(path)",
        "eval(text)",
    ],
)
def test_what_could_run_code_is_found(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search above finds each way that it is there to find."""
    monkeypatch.setattr("tests.test_supply.ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(text)
    assert [*_faults(path), *_loads_of_torch(path)]


def test_sbom_lists_what_the_locks_hold() -> None:
    """Each lock has a document with every package of it, its version and its hashes, the same each time."""
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
    """An index that does not answer about vulnerabilities is one line and a status that is no success."""
    command = [sys.executable, str(ROOT / "requirements" / "supply.py"), "audit"]
    run = subprocess.run(
        command, check=False, capture_output=True, text=True, env={"TOKENBUS_AUDIT_INDEX": "http://127.0.0.1:1"}
    )
    assert run.returncode == 2
    assert run.stderr.startswith("audit: not checked: ")
    assert run.stderr.count("\n") == 1
