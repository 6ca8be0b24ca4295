"""The examples in other languages as programs, where the machine has what they need."""

import fcntl
import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LANGUAGES = ("node", "cpp")
NEEDED = "NEEDS_LANGUAGES"
"""Set to 1, a machine without a language or its libraries is a failure and not a skip: .ci/run sets it."""
_TOOLS = {"node": ["node"], "cpp": ["g++", "make", "pkg-config", "protoc"]}
_COMPILE_SECONDS = 300


def program(language: str, name: str) -> list[str]:
    """Return the command that runs an example; skip the test where the machine cannot run it."""
    if language == "node":
        return script(EXAMPLES / "node" / f"{name}.js")
    missing = _missing(language)
    if missing:
        _skip(f"{EXAMPLES.name}/{language} needs {missing}")
    _compile()
    return [str(EXAMPLES / "cpp" / "build" / name)]


def script(path: Path) -> list[str]:
    """Return the command that runs a script in Node with the packages beside it; skip the test where they are not."""
    missing = _missing("node") or _missing_packages(path.parent)
    if missing:
        _skip(f"{path.name} needs {missing}")
    return ["node", str(path)]


@cache
def _missing(language: str) -> str:
    """Return what an example needs and the machine does not have; empty: it has all."""
    tools = [tool for tool in _TOOLS[language] if shutil.which(tool) is None]
    if tools:
        return ", ".join(tools)
    if language == "node":
        return ""
    found = subprocess.run(
        ["pkg-config", "--print-errors", "--exists", "protobuf", "libzmq"],  # noqa: S607 - whichever the machine has
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stderr.partition("\n")[0]


def _missing_packages(folder: Path) -> str:
    wanted = json.loads((folder / "package.json").read_text())["dependencies"]
    missing = []
    for name, version in wanted.items():
        installed = folder / "node_modules" / name / "package.json"
        if not installed.is_file() or json.loads(installed.read_text())["version"] != version:
            missing.append(f"{name} {version}")
    return f"npm's {', '.join(missing)} (make examples)" if missing else ""


def _skip(why: str) -> NoReturn:
    if os.environ.get(NEEDED) == "1":
        pytest.fail(why)
    pytest.skip(why)


@cache
def _compile() -> None:
    """Compile the programs in C++ where they are not; one process of the tests at a time."""
    with (EXAMPLES / "cpp" / "Makefile").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = ["make", "--directory", str(EXAMPLES / "cpp"), "--jobs", "2"]
        made = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
    assert made.returncode == 0, made.stderr
