"""All checks of the schema and of the files that are generated from it."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import DESCRIPTOR, FileDescriptorProto, FileDescriptorSet

from schema_tools.bounds import bound_faults
from schema_tools.compiled import SchemaError, Tree, baseline
from schema_tools.generate import stale_files
from schema_tools.vectors import vector_faults

_NAMES_SHOWN = 5


def faults(tree: Tree, *names: str) -> Iterator[str]:
    """Yield a line for each fault, with the name of the check and the remedy. Without names, all checks run."""
    for name in names or _CHECKS:
        try:
            yield from (f"{name}: {fault}" for fault in _CHECKS[name](tree))
        except SchemaError as error:
            yield f"{name}: {error}"


def _generated(tree: Tree) -> Iterator[str]:
    if stale := stale_files(tree):
        more = f" and {len(stale) - _NAMES_SHOWN} more" if len(stale) > _NAMES_SHOWN else ""
        yield f"out of date with the schema: {', '.join(stale[:_NAMES_SHOWN])}{more}; run `make proto`"


def _breaking(tree: Tree) -> Iterator[str]:
    # Before the first `make baseline`, no baseline exists to compare with.
    if not (released := baseline(tree)):
        return
    # The baseline lacks protobuf's own descriptor.proto, which buf needs.
    descriptor = FileDescriptorProto.FromString(DESCRIPTOR.serialized_pb)
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder, "baseline.binpb")
        image.write_bytes(FileDescriptorSet(file=[descriptor, *released]).SerializeToString())
        yield from _buf("breaking", str(tree.proto), "--against", str(image))


def _buf(*arguments: str) -> Iterator[str]:
    # The locked version of buf is next to this Python, even if the venv is not active.
    buf = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
    if buf is None:
        raise SchemaError("buf is not installed: run `make setup`")
    run = subprocess.run([buf, *arguments], capture_output=True, text=True, check=False)
    if run.returncode:
        yield from (run.stdout + run.stderr).strip().splitlines() or [f"buf ended with {run.returncode}"]


_CHECKS: dict[str, Callable[[Tree], Iterator[str]]] = {
    "generated": _generated,
    "lint": lambda tree: _buf("lint", str(tree.proto)),
    "format": lambda tree: _buf("format", str(tree.proto), "--diff", "--exit-code"),
    "breaking": _breaking,
    "bounds": bound_faults,
    "vectors": vector_faults,
}
