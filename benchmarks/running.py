"""The benchmarks there are, and how one runs as a child process: its report, its figures and its plot."""

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenbus_services.cli.errors import WRONG_USE, CommandError
from tokenbus_services.cli.local.signals import suspended_together
from tokenbus_services.printable import printable

_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_LAST_LINES = 20
_PACKAGE = "benchmarks"
_PROGRAM = "python -m"
_LEAVE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One module that `python -m` runs."""

    name: str
    title: str

    @property
    def module(self) -> str:
        """The module's name."""
        return f"{_PACKAGE}.{self.name}"


def find(root: Path) -> list[Benchmark]:
    """Return the benchmarks of a checkout, by name: the modules whose first line says how they are run.

    The other modules beside them are programs that a benchmark starts, or are shared.
    """
    folder = root / _PACKAGE
    found = [(path.parent.name, path) for path in folder.glob("*/__main__.py")]
    found += [(path.stem, path) for path in folder.glob("*.py")]
    heads = [(name, (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]) for name, path in found]
    return [
        Benchmark(name, head.partition(": `")[0])
        for name, head in sorted(heads)
        if f"`python -m {_PACKAGE}.{name}`" in head
    ]


def chosen(names: list[str], of: list[Benchmark]) -> list[Benchmark]:
    """Return the named benchmarks, or all; a CommandError says which names there are."""
    known = {benchmark.name: benchmark for benchmark in of}
    for name in names:
        if name not in known:
            raise CommandError(f"NAME: one of {', '.join(known)}, got {name!r}", WRONG_USE)
    return [known[name] for name in dict.fromkeys(names or known)]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one benchmark."""

    benchmark: Benchmark
    status: int
    seconds: float
    report: str
    """Its tables, as it printed them."""
    trouble: str
    """The last line of its standard error, if it failed."""
    record: dict[str, Any] | None = None
    """Its figures, if it writes them."""
    plot: bytes | None = None
    """Its figure as SVG, if it draws one."""

    @property
    def ran(self) -> bool:
        """Whether it measured something; one that lacks a peer or a device measures the rest."""
        return self.status == 0 or (self.status == WRONG_USE and bool(self.report.strip()))

    @property
    def goals(self) -> list[dict[str, Any]]:
        """Its goals, each with the measured value and whether it was met."""
        found = (self.record or {}).get("goals")
        return [goal for goal in found if isinstance(goal, dict)] if isinstance(found, list) else []

    @property
    def verdict(self) -> str:
        """Its outcome, in a few words."""
        if not self.ran:
            return f"did not run: {self.trouble}" if self.trouble else f"ended with status {self.status}"
        judged = [goal for goal in self.goals if isinstance(goal.get("met"), bool)]
        met = sum(goal["met"] for goal in judged)
        return (f"{met} of {len(judged)} goals met" if judged else "measured") + (
            f"; {self.trouble}" if self.trouble else ""
        )


def measure(benchmark: Benchmark, root: Path, *, quick: bool, on_line: Callable[[str], None]) -> Result:
    """Run a benchmark with those of --quick, --json and --plot that it has; `on_line` gets its progress."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tokenbus-bench-") as name:
        folder = Path(name)
        offered = _run([benchmark.module, "--help"], root, folder / "help", lambda _line: None)
        if offered.status:
            return Result(benchmark, offered.status, time.monotonic() - begin, "", offered.complaint)
        options = set(_OPTION.findall(offered.output))
        arguments = ["--quick"] if quick and "--quick" in options else []
        arguments += ["--json", str(folder / "record.json")] if "--json" in options else []
        arguments += ["--plot", str(folder / "plot")] if "--plot" in options else []
        done = _run([benchmark.module, *arguments], root, folder / "report", on_line)
        return Result(
            benchmark,
            done.status,
            time.monotonic() - begin,
            done.output,
            done.complaint if done.status else "",
            _record(folder / "record.json"),
            next((path.read_bytes() for path in sorted((folder / "plot").glob("*.svg"))), None),
        )


@dataclass(frozen=True, slots=True)
class _Done:
    status: int
    output: str
    complaint: str


def _run(arguments: list[str], root: Path, output: Path, on_line: Callable[[str], None]) -> _Done:
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,  # with what it starts itself, so that all of it can be stopped together
        )
        with _stopped_at_the_end(process), suspended_together(lambda: [process.pid]):
            last: deque[str] = deque(maxlen=_LAST_LINES)
            for line in process.stderr or ():
                last.append(printable(line.rstrip()))
                on_line(last[-1])
            status = process.wait()
    complaint = next((line for line in reversed(last) if line), "")
    return _Done(
        status, output.read_text(errors="replace"), complaint.removeprefix(f"{_PROGRAM} {arguments[0]}: error: ")
    )


@contextlib.contextmanager
def _stopped_at_the_end(process: "subprocess.Popen[str]") -> Iterator[None]:
    """Kill the benchmark's process group at the end of the block, however that ends."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LEAVE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def _record(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
