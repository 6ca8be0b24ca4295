"""The machine that a run is on: its name for the record, and the core that the run keeps to."""

import os
import platform
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tokenbus_contracts import native

_LIBRARIES = ("numpy", "protobuf", "msgspec", "pyzmq", "vllm", "torch")


def core_to_keep() -> AbstractSet[int]:
    """Return one of the cores that this process may use, or no core where a process cannot be pinned."""
    return {max(os.sched_getaffinity(0))} if hasattr(os, "sched_setaffinity") else set()


@contextmanager
def on_cores(cores: AbstractSet[int]) -> Iterator[None]:
    """Keep this thread, and those that it starts, to some cores; no cores means wherever it may run."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def description() -> dict[str, str]:
    """Return what a reader needs to know to judge the figures."""
    return {
        "cpu": cpu_name(),
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **dict(_versions()),
        "compiled check": "in use" if native.available() else "not installed",
    }


def _versions() -> Iterator[tuple[str, str]]:
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            yield name, version(name)


def cpu_name() -> str:
    """Return what the processor calls itself, with the numbers that tell its kind."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    lines = [line.split(":", 1) for line in text.splitlines() if ":" in line]
    fields = {name.strip(): value.strip() for name, value in lines}
    numbers = [f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields]
    return ", ".join([fields.get("model name", platform.machine()), *numbers])
