"""What every benchmark's command has: its options, its tables, and the machine that it ran on."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from tokenbus_contracts import native

_LIBRARIES = ("numpy", "protobuf", "msgspec", "pyzmq", "vllm", "torch")
_WRONG_USE = 2
_WHOLE = 100
"""From here on a figure is shown without a fraction."""
Cell = str | int | float | None
Row = Mapping[str, Cell]


class Report:
    """Prints what a benchmark measured as it comes, as Markdown, and keeps it for --json."""

    def __init__(self, name: str, about: str | None, examples: str = "") -> None:
        self._figures: dict[str, Any] = {}
        self.parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{name}",
            description=about,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.parser.add_argument("--quick", action="store_true", help="short, with rough figures: whether it works")
        self.parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
        """Takes options of the benchmark's own."""
        self._json: Path | None = None

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Return the options, and begin the report with the command and the machine."""
        options = self.parser.parse_args(arguments)
        self._json = options.json
        given = " ".join([self.parser.prog, *(sys.argv[1:] if arguments is None else arguments)])
        machine = self._figures["machine"] = description()
        self.say(f"`{given}` on {', '.join(f'{name}: {value}' for name, value in machine.items())}.")
        return options

    def say(self, text: str) -> None:
        print(f"{text}\n", flush=True)

    def table(self, rows: Sequence[Row], title: str = "figures") -> None:
        """Print a table, whose columns are the rows' keys; the title names it in the JSON file."""
        self._figures[title] = [dict(row) for row in rows]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        lines = [columns, ["---"] * len(columns), *([_shown(row.get(name)) for name in columns] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        if title != "figures":
            self.say(f"**{title}**")
        for line in lines:
            cells = (cell.ljust(width, "-" if cell == "---" else " ") for cell, width in zip(line, widths, strict=True))
            print(f"| {' | '.join(cells)} |")
        print(flush=True)

    def keep(self, title: str, value: object) -> None:
        """Keep a value for the JSON file, and print nothing."""
        self._figures[title] = value

    def fail(self, error: Exception) -> NoReturn:
        self.parser.exit(_WRONG_USE, f"{self.parser.prog}: {error}\n")

    def write(self) -> None:
        if self._json:
            self._json.write_text(json.dumps(self._figures, indent=1) + "\n")


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _shown(cell: Cell) -> str:
    match cell:
        case None:
            return ""
        case float():
            return f"{cell:,.0f}" if abs(cell) >= _WHOLE else f"{cell:.3g}"
        case int():
            return f"{cell:,}"
    return cell


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
    versions = {}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "cpu": _cpu_name(),
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **versions,
        "compiled check": "in use" if native.available() else "not installed",
    }


def _cpu_name() -> str:
    """Return the processor's name, with the numbers that tell its kind."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    lines = [line.split(":", 1) for line in text.splitlines() if ":" in line]
    fields = {name.strip(): value.strip() for name, value in lines}
    numbers = [f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields]
    return ", ".join([fields.get("model name", platform.machine()), *numbers])
