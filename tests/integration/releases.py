"""The release 0.1.0: its commit, its packages as pip installs them, and its program that works for a test."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.pages import ROOT
from tests.support import processes
from tests.support.waiting import MOST

RELEASE = "1dcd71607470b794a66878e42fcd5bd0bc46fd1b"
"""The commit of the release 0.1.0."""
FROZEN = ROOT / "contracts" / "baseline" / "0.1.0"
"""What is kept of the release: its schema, and a stream that it recorded, with what a reader must find in that."""
_PROGRAM = Path(__file__).with_name("released_program.py")


@contextmanager
def _shared(factory: pytest.TempPathFactory, name: str) -> Iterator[tuple[Path, bool]]:
    """Yield a folder that all workers of this run share, and whether it is there; one at a time may make it."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder, folder.exists()


@pytest.fixture(scope="session")
def release_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of the release."""
    git = ["git", "-C", str(ROOT)]
    if subprocess.run([*git, "cat-file", "-e", f"{RELEASE}^{{commit}}"], check=False, capture_output=True).returncode:
        pytest.skip(f"the history here does not reach back to the release 0.1.0 ({RELEASE[:12]})")
    with _shared(tmp_path_factory, "release-source") as (source, is_made):
        if not is_made:
            archive = subprocess.run([*git, "archive", RELEASE], check=True, capture_output=True).stdout
            source.mkdir()
            unpack = ["tar", "-x", "-C", str(source)]  # `TarFile.extractall` warns without an argument 3.11.2 lacks
            subprocess.run(unpack, input=archive, check=True)
    return source


@pytest.fixture(scope="session")
def released(release_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the packages of the release, installed as pip installs them."""
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    with _shared(tmp_path_factory, "released") as (installed, is_made):
        if not is_made:
            command = [sys.executable, *install, "--target", str(installed), str(release_source)]
            subprocess.run(command, check=True, capture_output=True)
    return installed


def run_released(
    released: Path, name: str, job: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a job of released_program.py in the release, and return its result."""
    command = [sys.executable, "-P", str(_PROGRAM), name]
    variables = {**(environment or {}), "PYTHONPATH": str(released)}
    done = processes.run(command, env=variables, input=json.dumps(job).encode(), text=True, timeout=MOST)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    package = result.pop("package")
    assert Path(package).is_relative_to(released), package
    return result
