"""The project's own rules about itself: which package imports which, and what the locks and CI hold."""

import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tokenbus.cli import _GROUPS
from tokenbus.settings import ENTRIES

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "tokenbus_contracts": ROOT / "contracts" / "tokenbus_contracts",
    "tokenbus_gpu_ops": ROOT / "gpu_ops" / "tokenbus_gpu_ops",
    "tokenbus": ROOT / "services" / "tokenbus",
}
ORDER = list(PACKAGES)


def _modules(path: Path) -> set[str]:
    code = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
    return set(re.findall(r"^ *(?:from|import) ([\w.]+)(?: import| as|,|$)", code, re.MULTILINE))


def _imported(path: Path) -> set[str]:
    return {name.split(".")[0] for name in _modules(path)}


@pytest.mark.parametrize("package", ORDER)
def test_imports_point_one_way(package: str) -> None:
    """Tokenbus may import gpu_ops and contracts, gpu_ops may import contracts, and contracts neither."""
    later = set(ORDER[ORDER.index(package) + 1 :]) | {"schema_tools", "tests", "benchmarks"}
    for path in PACKAGES[package].rglob("*.py"):
        assert not _imported(path) & later, path


def test_contracts_need_numpy_and_protobuf_alone() -> None:
    """The contract's package imports nothing that is not Python's own but numpy and protobuf.

    Only type checkers read `typing_extensions`.
    """
    found = set().union(*(_imported(path) for path in PACKAGES["tokenbus_contracts"].rglob("*.py")))
    assert found - sys.stdlib_module_names == {"numpy", "google", "tokenbus_contracts", "typing_extensions"}


_TOKENBUS = PACKAGES["tokenbus"]
_MAY_IMPORT = {
    "bus": "", "cli": "bus client delivery gateway metrics model_files processor recordings worker",
    "client": "bus delivery recordings", "delivery": "", "engines": "bus cli delivery model_files worker",
    "gateway": "bus client delivery metrics model_files recordings", "logs": "",
    "metrics": "bus delivery processor recordings worker", "model_files": "", "processor": "bus delivery recordings",
    "recordings": "bus delivery", "settings": "", "testing": "bus client engines processor worker",
    "worker": "bus delivery metrics",
}  # fmt: skip
"""Which folders of tokenbus each of them imports, beside the modules next to them, settings and logs.

Engines import the command line for FastDeploy's command alone. The metrics of a process look at what it runs.
"""


def test_folders_of_tokenbus_import_what_they_may() -> None:
    folders = {path.name for path in _TOKENBUS.iterdir() if (path / "__init__.py").is_file()}
    assert set(_MAY_IMPORT) == folders
    for name, others in _MAY_IMPORT.items():
        allowed = {*others.split(), name, "settings", "logs"}
        for path in (_TOKENBUS / name).rglob("*.py"):
            imported = {name.split(".")[1] for name in _modules(path) if name.startswith("tokenbus.")} & folders
            assert imported <= allowed, path


def test_engines_alone_compute_on_cards() -> None:
    """What runs no engine imports nothing of gpu_ops; the public names load `token_logprobs` when it is used."""
    users = {
        path.relative_to(_TOKENBUS).parts[0]
        for path in _TOKENBUS.rglob("*.py")
        if "tokenbus_gpu_ops" in _imported(path)
    }
    assert users == {"engines", "__init__.py"}


def _named(text: str) -> set[str]:
    """Return the modules that a text imports or names in full, as `python -m`, entry points and tests do."""
    found = set(re.findall(r"[\w.]*\w\.\w+|\"\w+\"", text))
    for module, names in re.findall(r"^ *from ([\w.]+) import (\([^)]*\)|.*)", text, re.MULTILINE):
        found |= {module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))}
    return found


def test_no_file_is_dead() -> None:
    """Every module is imported by another file, or named in full where programs and plugins are."""
    folders = [*PACKAGES.values(), ROOT / "contracts" / "schema_tools", ROOT / "tests", ROOT / "benchmarks"]
    modules = {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts): path
        for folder in folders
        for path in folder.rglob("*.py")
        if "generated" not in path.parts
        and not (path.stem in {"__init__", "__main__", "conftest", "sitecustomize"} or path.name.startswith("test_"))
    }
    pages = [ROOT / "pyproject.toml", ROOT / "Makefile", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    others = {*pages, *(path for folder in folders for path in folder.rglob("*.py"))} - {*modules.values()}
    named = Counter(name for path in {*modules.values(), *others} for name in _named(path.read_text()))
    alive = {f"tokenbus.cli.{name.replace('-', '_')}" for group in _GROUPS.values() for name in group}
    dead = []
    for name, path in modules.items():
        own, ways = _named(path.read_text()), (name, path.name, f'"{path.stem}"')
        if all(named[way] <= (way in own) for way in ways):
            dead.append(name)
    assert not set(dead) - alive


def test_no_setting_is_dead() -> None:
    read = {
        attribute
        for path in _TOKENBUS.rglob("*.py")
        if path.parent != _TOKENBUS / "settings"
        for attribute in re.findall(r"\.(\w+)", path.read_text())
    }
    assert [key for key in ENTRIES if key.split(".")[1] not in read] == []


_FUNCTION = re.compile(r"^( *)(?:async def|def|class) (\w+)\b(.*(?:\n(?:\1[ )].*)?)*)", re.MULTILINE)
_ASSERTS = re.compile(r"\b(?:assert|AssertionError|raises|warns|fail)\b")


def _without_assertion(folder: Path) -> list[str]:
    """Return the tests that assert nothing, not by a helper either: one each of whose definitions does."""
    found: defaultdict[str, list[tuple[Path, str]]] = defaultdict(list)
    for path in folder.rglob("*.py"):
        text = path.read_text()
        for indent in range(0, 12, 4):  # a method lies within a class, and a match in no other
            for each in re.finditer(_FUNCTION.pattern.replace("( *)", f"( {{{indent}}})"), text, re.MULTILINE):
                found[each[2]].append((path, each[3]))
    asserting: set[str] = set()

    def asserts(body: str) -> bool:
        return _ASSERTS.search(body) is not None or not asserting.isdisjoint(re.findall(r"\w+", body))

    while more := {
        name for name, all_ in found.items() if name not in asserting and all(asserts(body) for _, body in all_)
    }:
        asserting |= more
    tests = [(name, *each) for name, all_ in found.items() if name.startswith("test_") for each in all_]
    return [f"{path}::{name}" for name, path, body in tests if not asserts(body)]


def test_every_test_asserts_something(tmp_path: Path) -> None:
    """A test that only runs what it is about passes whatever that does; one that asserts through a helper is found."""
    assert _without_assertion(ROOT / "tests") == []
    (tmp_path / "test_made.py").write_text(
        "def check(x): assert x\n"
        "def checked(x): check(x)\n"
        "def run(x): x()\n"
        "def test_by_helper(): checked(1)\n"
        "async def test_of_nothing(): run(print)\n"
    )
    assert _without_assertion(tmp_path) == [f"{tmp_path}/test_made.py::test_of_nothing"]


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.stem)
def test_locks_have_hashes_and_no_addresses(path: Path) -> None:
    text = path.read_text()
    requirements = [block for block in re.split(r"\n(?=\S)", text) if not block.startswith("#")]
    assert requirements
    for block in requirements:
        assert re.match(r"[\w.\-\[\],]+==\S+", block), block
        assert "--hash=sha256:" in block, block
    assert "://" not in text
    assert "--index" not in text


def test_other_protobuf_implementation_is_refused_by_name() -> None:
    """Protobuf's pure Python implementation reads some encodings otherwise: it may write batches, and not read them."""
    environment = os.environ | {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    vector = ROOT / "contracts" / "vectors" / "v1" / "valid" / "one_row.binpb"
    written = "import tokenbus_contracts as t; header = t.BatchHeader('w', epoch=1, sequence=1, step=1, step_rows=0)"
    read = f"t.decode(open({str(vector)!r}, 'rb').read())"
    program = f"{written}; print(t.encode(t.LogprobBatch(header)).hex(), flush=True); {read}"
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    usual = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.returncode == 1
    assert "ImportError: tokenbus needs protobuf's compiled implementation, upb" in run.stderr
    assert run.stdout == usual.stdout
    assert run.stdout.strip()
