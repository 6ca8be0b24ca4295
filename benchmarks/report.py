"""What every benchmark's command has: its options, its tables, and the page of docs/benchmarks that it writes."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

from benchmarks.machine import description
from tokenbus_services.terminal import styled

DOCS = Path("docs/benchmarks")
MARK = "<!-- What follows is what the command printed: the next run with --write-docs writes it anew. -->"
"""On a page, what is before it is written by hand."""
_WRONG_USE = 2
_WHOLE = 100
"""From here on a figure is shown without a fraction."""


class Goal(NamedTuple):
    """A figure that has a goal; shown in bold where it misses that."""

    value: float
    limit: str
    is_met: bool
    shown: str = ""
    """How the figure is written, as a format; empty: as any other."""

    @classmethod
    def at_most(cls, value: float, most: float, shown: str = "") -> Self:
        """Return a figure that is to be low."""
        return cls(value, f"at most {most:,g}", value <= most, shown)

    @classmethod
    def at_least(cls, value: float, least: float, shown: str = "") -> Self:
        """Return a figure that is to be high."""
        return cls(value, f"at least {least:,g}", value >= least, shown)


Cell = str | int | float | Goal | None
Row = Mapping[str, Cell]


class Report:
    """Prints what a benchmark measured as it comes, and keeps it for --json and the page."""

    def __init__(self, name: str, about: str | None, examples: str = "") -> None:
        self._page = DOCS / f"{name.rpartition('.')[2].replace('_', '-')}.md"
        self._lines: list[str] = []
        self._figures: dict[str, Any] = {}
        self.parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{name}",
            description=about,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.parser.add_argument("--quick", action="store_true", help="short, with rough figures: whether it works")
        self.parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
        self.parser.add_argument("--write-docs", action="store_true", help=f"write the tables into {self._page}")
        """Takes options of the benchmark's own."""
        self._options = argparse.Namespace()
        self._command = ""

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Return the options, and begin the report with what it was measured on."""
        self._options = self.parser.parse_args(arguments)
        self._command = shlex.join([*self.parser.prog.split(), *(sys.argv[1:] if arguments is None else arguments)])
        machine = description()
        self._figures["machine"] = machine
        self.say(f"`{self._command}` on {', '.join(f'{name}: {value}' for name, value in machine.items())}.")
        return self._options

    def say(self, text: str) -> None:
        """Print a paragraph."""
        self._lines += [text, ""]
        print(f"{text}\n", flush=True)

    def table(self, rows: Sequence[Row], title: str = "figures") -> None:
        """Print a table, whose columns are the rows' keys; the title names it in the JSON file.

        Where all goals of a column are one, the last line says it.
        """
        self._figures[title] = [{name: _value(cell) for name, cell in row.items()} for row in rows]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        goals = [_goal_of([row.get(name) for row in rows]) for name in columns]
        shown = [[_shown(row.get(name), goal) for name, goal in zip(columns, goals, strict=True)] for row in rows]
        if any(goals):
            shown.append([goals[0] or "goal", *goals[1:]])
        lines = [columns, ["---"] * len(columns), *shown]
        if title != "figures":
            self.say(f"**{title}**")
        self._lines += [*(f"| {' | '.join(line)} |" for line in lines), ""]
        print(_aligned(lines), flush=True)

    def fail(self, error: Exception) -> NoReturn:
        """Leave, because it cannot be measured here."""
        self.parser.exit(_WRONG_USE, f"{self.parser.prog}: {error}\n")

    def write(self) -> None:
        """Write what the options ask for."""
        if self._options.json:
            self._options.json.write_text(json.dumps(self._figures, indent=1) + "\n")
        if self._options.write_docs:
            head = self._page.read_text().partition(MARK)[0] if self._page.exists() else ""
            self._page.write_text(f"{head}{MARK}\n\n" + "\n".join(self._lines).rstrip() + "\n")


def progress(text: str) -> None:
    """Say what is being measured."""
    print(text, file=sys.stderr, flush=True)


def _value(cell: Cell) -> Cell:
    return cell.value if isinstance(cell, Goal) else cell


def _goal_of(column: Sequence[Cell]) -> str:
    """Return the goal of all figures of a column that have one, or an empty string: they have none, or several."""
    limits = {cell.limit for cell in column if isinstance(cell, Goal)}
    return limits.pop() if len(limits) == 1 else ""


def _shown(cell: Cell, goal: str) -> str:
    match cell:
        case None:
            return ""
        case Goal():
            figure = f"{cell.value:{cell.shown}}" if cell.shown else _shown(cell.value, "")
            text = figure if cell.limit == goal else f"{figure} ({cell.limit})"
            return text if cell.is_met else f"**{text}**"
        case float():
            return f"{cell:,.0f}" if abs(cell) >= _WHOLE else f"{cell:.3g}"
        case int():
            return f"{cell:,}"
    return cell


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return a table for a terminal, which is Markdown too; there, what misses its goal is red."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    is_terminal = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def padded(cell: str, width: int) -> str:
        text = cell.ljust(width, "-" if cell == "---" else " ")
        return styled(text, "red") if is_terminal and cell.startswith("**") else text

    return "".join(f"| {' | '.join(map(padded, line, widths))} |\n" for line in lines)
