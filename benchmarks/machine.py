"""The machine that a run is on: its name for the record, and the core that the run keeps to."""

import os
import platform
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, Self

from tokenbus_contracts import native

_OF_VLLM = ("vllm", "torch")
LIBRARIES = ("numpy", "protobuf", "msgspec", "pyzmq", *_OF_VLLM)


class Placement(NamedTuple):
    """The core that a run keeps to, and those that it leaves alone; neither where a process cannot be pinned."""

    core: int | None
    others: AbstractSet[int]

    @classmethod
    def here(cls) -> Self:
        """Choose among the cores that this process may use now."""
        if not hasattr(os, "sched_setaffinity"):
            return cls(None, frozenset())
        allowed = os.sched_getaffinity(0)
        core = max(allowed)
        return cls(core, allowed - {core})

    @property
    def kept(self) -> AbstractSet[int]:
        """The core to keep to, as a set."""
        return frozenset() if self.core is None else {self.core}


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


def description(placement: Placement, *, vllm: bool) -> dict[str, str]:
    """Return what a reader needs to know to judge the figures; vLLM is named only where it took part."""
    return {
        "cpu": cpu_name(),
        "cores": str(os.cpu_count()),
        "pinned": "no: not possible here" if placement.core is None else f"core {placement.core}",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **dict(_versions(vllm=vllm)),
        "compiled check": "in use" if native.available() else "not installed",
    }


def in_words(described: Mapping[str, str]) -> str:
    """Return a description as a line of a page."""
    return ", ".join(f"{name}: {value}" for name, value in described.items())


def _versions(*, vllm: bool) -> Iterator[tuple[str, str]]:
    for name in LIBRARIES:
        if vllm or name not in _OF_VLLM:
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
