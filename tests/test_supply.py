"""What comes from elsewhere: what is on the wire and on disk runs no code, and the locks are reported as they are."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import ROOT

PACKAGES = ("contracts/tokenbus_contracts", "gpu_ops/tokenbus_gpu_ops", "services/tokenbus")
RUN_CODE = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "joblib", "cloudpickle", "jsonpickle", "torch"}
"""Modules whose readers run, or may run, what they read."""
READERS = {"load", "loads", "open_memmap"}
_SUSPECT = re.compile(rf"\b(?:{'|'.join(sorted(RUN_CODE))}|paddle|\w+_pyobj|allow_pickle|weights_only|eval|exec)\b")
"""What a module has in it that is worth parsing."""


def _modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def _faults(path: Path) -> Iterator[str]:
    """Yield what in a module could read bytes as code: imports, by whatever way, names, arguments, torch.load."""
    if not _SUSPECT.search(text := path.read_text()):
        return
    nodes = list(ast.walk(ast.parse(text)))
    frameworks = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.split(".")[0] in {"torch", "paddle"}
    }
    for node in nodes:
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        match node:
            case ast.Import(names=names):
                found = RUN_CODE.intersection(alias.name.split(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module)):
                found = RUN_CODE & {module.split(".")[0]}
            case ast.Constant(value=str(value)):  # as importlib and __import__ would be given it
                found = (RUN_CODE - {"torch"}) & {value}
            case ast.Attribute(attr="send_pyobj" | "recv_pyobj" | "read_pickle" as name):
                found = {name}
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if attribute in READERS:
                found = {f"{name}.{attribute}"} if name in frameworks else set()
            case ast.keyword(arg="allow_pickle" | "weights_only" as name, value=value):
                is_safe = isinstance(value, ast.Constant) and value.value is (name == "weights_only")
                found = set() if is_safe else {name}
            case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
                found = {name}
            case _:
                found = set()
        yield from (f"{where}: {each}" for each in found)


def test_nothing_that_is_read_can_run_code() -> None:
    """No module of the packages can unpickle: not by import or name, by pyzmq, numpy or a framework (case 32)."""
    modules = _modules()
    assert len(modules) > 100
    found = [fault for path in modules for fault in _faults(path)]
    # A bridge to the framework hands arrays over in memory; it reads nothing.
    assert [fault for fault in found if not fault.endswith(": torch")] == []


def test_what_could_run_code_is_found(tmp_path: Path) -> None:
    """The search above finds each way that it is there to find."""
    path = tmp_path / "module.py"
    for text in (
        "import pickle",
        "def f():\n    from pickle import loads",
        "import importlib\nimportlib.import_module('pickle')",
        "__import__('marshal')",
        "socket.recv_pyobj()",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=wanted)",
        "import paddle as p\np.load(path)",
        "eval(text)",
    ):
        path.write_text(text)
        assert list(_faults(path)), text


@pytest.mark.nightly
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
