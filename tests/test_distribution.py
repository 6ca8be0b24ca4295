"""What users install: the built wheel, and the README they read first."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.pages import PAGES

pytestmark = pytest.mark.xdist_group("distribution")  # what its tests share is made once
ROOT = Path(__file__).resolve().parents[1]

_USE = """
import sys
sys.path.insert(0, sys.argv[1])
import tokenbus_contracts, tokenbus_gpu_ops, tokenbus_services.cli
assert tokenbus_contracts.__file__.startswith(sys.argv[1]), tokenbus_contracts.__file__
batch = tokenbus_contracts.decode(open(sys.argv[2], "rb").read())
print(batch.token_ids.tolist(), sorted(m for m in ("paddle", "torch", "cupy", "cuda", "zmq") if m in sys.modules))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    """The wheel has the three import packages, typed, with the generated code, and no generic name beside them."""
    names = zipfile.ZipFile(wheel).namelist()
    packages = {"tokenbus", "tokenbus_contracts", "tokenbus_engines", "tokenbus_gpu_ops", "tokenbus_services"}
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == packages | {"tokenbus_fastdeploy.pth"}
    assert {f"{package}/py.typed" for package in packages} <= set(names)
    assert "tokenbus_contracts/generated/logprob_batch_pb2.py" in names
    assert not [name for name in names if "schema_tools" in name or "tests" in name]


def test_wheel_has_the_compiled_check_for_its_platform(wheel: Path) -> None:
    """With a compiler, the wheel has the library and is for this platform, and for every Python 3."""
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    contents = zipfile.ZipFile(wheel)
    assert {f"tokenbus_contracts/native/accept.{kind}" for kind in ("c", "so")} <= set(contents.namelist())
    (about,) = (name for name in contents.namelist() if name.endswith(".dist-info/WHEEL"))
    assert f"Root-Is-Purelib: false\nTag: py3-none-{platform}\n" in contents.read(about).decode()


def test_wheel_without_a_compiler_is_pure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    nowhere = os.environ | {"CC": str(tmp_path / "no-compiler")}
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, env=nowhere)
    assert "in Python, slower, what accept.c does" in run.stdout + run.stderr
    (built,) = tmp_path.glob("*.whl")
    assert built.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(built).namelist() if name.endswith(".so")]


def test_wheel_works_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    """What is installed from the wheel decodes a golden message, and imports no framework and no socket library."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    vector = ROOT / "contracts" / "vectors" / "v1" / "valid" / "one_row.binpb"
    run = subprocess.run(
        [sys.executable, "-I", "-c", _USE, str(tmp_path), str(vector)], check=True, capture_output=True, text=True
    )
    assert run.stdout == "[42] []\n"


@pytest.mark.parametrize("is_editable", [False, True])
def test_installed_switch_is_live(is_editable: bool, wheel: Path, tmp_path: Path) -> None:  # noqa: FBT001
    """Where the wheel is installed, or the sources are as `make setup` does it, TOKENBUS_FASTDEPLOY=on is heeded."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = str(environment / "bin" / "python")
    if is_editable:
        # A copy, as what is built in place would be another test's.
        named = (
            "pyproject.toml",
            "hatch_build.py",
            "README.md",
            "LICENSE",
            "contracts",
            "gpu_ops",
            "proto",
            "services",
        )
        for name in named:
            (tmp_path / "copy").mkdir(exist_ok=True)
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / "copy" / name)
        built = ["--no-build-isolation", "--editable", str(tmp_path / "copy")]
    else:
        built = [str(wheel)]
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    searched = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} if is_editable else None
    subprocess.run([*install, *built], check=True, capture_output=True, env=searched)
    asked = "import sys; print(sys.modules['tokenbus_engines.fastdeploy_switch'].state())"
    variables = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [python, "-c", asked], check=True, capture_output=True, text=True, env=variables | {"TOKENBUS_FASTDEPLOY": "on"}
    )
    assert run.stdout.startswith("TOKENBUS_FASTDEPLOY: on needs FastDeploy, got no package")
    assert run.stderr == ""


def test_links_in_the_documents_lead_somewhere() -> None:
    for page in (*PAGES, *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"


def test_readme_shows_the_measured_figures() -> None:
    """The comparison in the README and in docs/contract.md has the figures of docs/benchmarks/codec.md."""
    page = (ROOT / "docs" / "benchmarks" / "codec.md").read_text()
    found = re.findall(r"^\| ([^|]+?) +((?:\| +[\d,.]+ +){3})\|", page.partition("times Tokenbus")[0], re.MULTILINE)
    us = {peer: [float(cell.replace(",", "")) for cell in cells.split("|")[1:]] for peer, cells in found}
    ours = us["Tokenbus"]
    readme, contract = (ROOT / "README.md").read_text(), (ROOT / "docs" / "contract.md").read_text()
    for text in (readme, contract):
        assert f"{ours[0]:.0f} to {ours[2]:.0f} microseconds" in text
    for peer, least, most in (("FastDeploy SysV struct", 16, 18), ("vLLM", 19, 27)):
        assert all(least <= round(theirs / own) <= most for theirs, own in zip(us[peer], ours, strict=True))
        assert all(f"{least} to {most} times" in text for text in (readme, contract))
