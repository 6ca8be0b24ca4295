"""What users install, the built wheel: in an environment of its own, and run from another folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from signal import SIGTERM

import httpx
import pytest

from tests.cli.local import Command, environment
from tests.engines.fastdeploy import stand_in
from tests.engines.fastdeploy.test_switch import SWITCHED, Machine
from tests.support.waiting import MOST

pytestmark = pytest.mark.xdist_group("distribution")  # what its tests share is made once
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "services" / "tokenbus" / "gateway" / "page"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packages = {"tokenbus", "tokenbus_contracts", "tokenbus_gpu_ops"}
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == packages | {"tokenbus_fastdeploy.pth"}
    assert {f"{package}/py.typed" for package in packages} <= set(names)
    assert "tokenbus_contracts/generated/logprob_batch_pb2.py" in names
    assert not [name for name in names if "schema_tools" in name or "tests" in name]


def test_wheel_has_the_compiled_check_for_its_platform(wheel: Path) -> None:
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    contents = zipfile.ZipFile(wheel)
    assert {f"tokenbus_contracts/native/accept.{kind}" for kind in ("c", "so")} <= set(contents.namelist())
    (about,) = (name for name in contents.namelist() if name.endswith(".dist-info/WHEEL"))
    assert f"Root-Is-Purelib: false\nTag: py3-none-{platform}\n" in contents.read(about).decode()


@pytest.mark.nightly
def test_wheel_without_a_compiler_is_pure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    nowhere = os.environ | {"CC": str(tmp_path / "no-compiler")}
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, env=nowhere)
    assert "in Python, slower, what accept.c does" in run.stdout + run.stderr
    (built,) = tmp_path.glob("*.whl")
    assert built.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(built).namelist() if name.endswith(".so")]


@pytest.fixture(scope="module")
def programs(wheel: Path) -> Iterator[Path]:
    """The folder of programs of an environment with the wheel; what it depends on is this environment's."""
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        made = Path(folder, "bin")
        _environment(made.parent, "--no-deps", "--no-index", str(wheel))
        (packages,) = made.parent.glob("lib/python*/site-packages")
        (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
        yield made


def _environment(folder: Path, *installed: str, **variables: str) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet", *installed]
    subprocess.run(pip, check=True, capture_output=True, env=os.environ | variables)


def test_installed_system_answers_and_shows_its_page(
    programs: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    roles = ["--workers", "1", "--prefill", "0", "--decode", "0"]
    program = [str(programs / "tokenbus")]
    with Command(["up", *roles, "--json"], environment(folder), program) as command:
        up = command.event("up")
        with httpx.Client(base_url=up["gateway"], timeout=MOST) as client:
            command.wait_until(lambda: client.get("/readyz").is_success)
            (model,) = (each["id"] for each in client.get("/v1/models").json()["data"])
            body = {"model": model, "prompt": "It was", "max_tokens": 8, "logprobs": 2, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body).json()
            (choice,) = answer["choices"]
            assert answer["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"]) == 8
            files = {path.name: path.read_bytes() for path in PAGE.iterdir()}
            assert client.get("/").content == files.pop("index.html")
            assert {name: client.get(f"/page/{name}").content for name in files} == files
        command.signal(SIGTERM)
        assert command.event("down")["died"] == []
        assert command.end() == (0, "", "")


@pytest.mark.nightly
def test_installed_switch_replaces_the_ops(programs: Path, folder: Path) -> None:
    """From the wheel too, TOKENBUS_FASTDEPLOY=on is heeded, with no word of anything that is missing."""
    stand_in.install(folder)
    run = Machine(programs, folder).serve("spawn", TOKENBUS_FASTDEPLOY="on")
    assert (run.returncode, run.stdout) == (0, SWITCHED), run.stderr
    assert "ops replaced" in run.stderr
    assert "has no effect" not in run.stderr


@pytest.mark.nightly
def test_switch_of_an_editable_install_is_live(tmp_path: Path) -> None:
    """Where the sources are installed as `make setup` does it, TOKENBUS_FASTDEPLOY=on is heeded."""
    copy, environment = tmp_path / "copy", tmp_path / "environment"
    copy.mkdir()
    # A copy, as what is built in place would be another test's.
    named = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "contracts", "gpu_ops", "proto", "services")
    for name in named:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copy / name)
    sources = ["--no-build-isolation", "--editable", str(copy)]
    _environment(environment, "--no-deps", "--no-index", *sources, PYTHONPATH=os.pathsep.join(sys.path))
    asked = "import sys; print(sys.modules['tokenbus.engines.fastdeploy_switch'].state())"
    variables = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [str(environment / "bin" / "python"), "-c", asked],
        check=True,
        capture_output=True,
        text=True,
        env=variables | {"TOKENBUS_FASTDEPLOY": "on"},
    )
    assert run.stdout.startswith("TOKENBUS_FASTDEPLOY: on needs FastDeploy, got no package")
    assert run.stderr == ""
