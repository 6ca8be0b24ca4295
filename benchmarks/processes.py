"""Processes and all below them: the processor time of each role. Linux alone has what is read here."""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

MODEL, CORE = "model", "core"
_TITLES = {"VLLM::Worker": MODEL, "VLLM::EngineCore": CORE}
"""What vLLM calls its processes, to which role each belongs."""
_PROC = Path("/proc")
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_USER, _SYSTEM = 11, 12
"""Fields of a process's `stat`, counted from behind its name."""

Seconds = dict[str, float]


def seconds(roots: Mapping[str, Iterable[int]]) -> Seconds:
    """Return the processor seconds of each role so far: of its processes and of all below them.

    A process of vLLM's that runs the model, or its engine core, has a role of its own wherever it stands.
    """
    found: defaultdict[str, float] = defaultdict(float)
    for role, pids in roots.items():
        for root in pids:
            found[role] += 0  # one that has not used any time yet is there too
            for pid in below(root):
                try:
                    found[_role(pid, role)] += processor_seconds(pid)
                except OSError:  # it has ended meanwhile
                    continue
    return dict(found)


def below(pid: int) -> Iterator[int]:
    """Yield a process and all below it."""
    yield pid
    for path in (_PROC / str(pid) / "task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from below(int(child))


def spent(before: Seconds, after: Seconds) -> Seconds:
    """Return what each role has used between two times."""
    return {role: after[role] - before.get(role, 0.0) for role in after}


def _role(pid: int, role: str) -> str:
    title = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace")
    return next((own for begin, own in _TITLES.items() if title.startswith(begin)), role)


def processor_seconds(pid: int) -> float:
    """Return the processor seconds of one process so far; raises OSError if there is none."""
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS_A_SECOND
