"""The programs in Node, where the machine has what they need."""

import json
import os
import shutil
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NEEDED = "NEEDS_NODE"
"""Set to 1, a machine without Node or its packages is a failure and not a skip: .ci/run sets it."""


def program(name: str) -> list[str]:
    """Return the command that runs an example; skip the test where the machine cannot run it."""
    return script(EXAMPLES / "node" / f"{name}.js")


def script(path: Path) -> list[str]:
    """Return the command that runs a script with the packages beside it; skip the test where they are not."""
    missing = "node" if shutil.which("node") is None else _missing_packages(path.parent)
    if not missing:
        return ["node", str(path)]
    if os.environ.get(NEEDED) == "1":
        pytest.fail(f"{path.name} needs {missing}")
    pytest.skip(f"{path.name} needs {missing}")


def _missing_packages(folder: Path) -> str:
    wanted = json.loads((folder / "package.json").read_text())["dependencies"]
    missing = []
    for name, version in wanted.items():
        installed = folder / "node_modules" / name / "package.json"
        if not installed.is_file() or json.loads(installed.read_text())["version"] != version:
            missing.append(f"{name} {version}")
    return f"npm's {', '.join(missing)} (make examples)" if missing else ""
