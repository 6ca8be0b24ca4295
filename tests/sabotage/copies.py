"""Scratch copies of the working tree: a line is broken there, and tests run there, on the copy's own code."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from pathlib import Path

from hatch_build import NATIVE, compile_library
from tests.sabotage.table import ROOT, Line

SOURCES = ("contracts", "gpu_ops", "services")
"""The folders that hold the packages."""
_WHERE = """
import tokenbus, tokenbus_contracts, tokenbus_gpu_ops
print(*tokenbus.__path__, *tokenbus_contracts.__path__, *tokenbus_gpu_ops.__path__)
"""
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly")
_FAILED = 1
"""The status of pytest where a test ran and failed; one that cannot be collected has another."""


class Outcome(StrEnum):
    """What became of a line that was broken."""

    KILLED = "killed"
    SURVIVED = "survived"
    HUNG = "hung"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one line, after how long, and what its test printed."""

    line: Line
    outcome: Outcome
    seconds: float
    printed: str


class Copy:
    """A copy of all files that git knows or does not ignore, and of the compiled libraries."""

    def __init__(self, folder: Path, seconds: float, options: Sequence[str] = ("-x",)) -> None:
        self._options = options
        self._folder = folder
        self._seconds = seconds
        self._times = count(int(time.time()))
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],  # noqa: S607 - as a developer's
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        libraries = [f"{name}.so" for name in NATIVE]
        for name in [*filter(None, listed.stdout.decode().split("\0")), *libraries]:
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        found = self._run(["-c", _WHERE])[1].split()
        if not found or not all(Path(each).is_relative_to(folder) for each in found):
            raise RuntimeError(f"{found}: not the copy's code, which is in {folder}")

    def failures(self, tests: Sequence[str]) -> str:
        """Run tests on what is here now; return what they print, or nothing if all pass."""
        status, printed = self._run([*_PYTEST, *tests], len(tests)) if tests else (0, "")
        return printed if status else ""

    def broken(self, line: Line) -> Result:
        """Break a line, run its test, and mend the line again."""
        path, began = self._folder / line.file, time.monotonic()
        whole = path.read_text()
        try:
            fault = self._write(path, whole.replace(line.text, line.broken)) or self._import_fault(path)
            outcome, printed = (Outcome.INVALID, fault) if fault else self._tested(line.test.split())
        finally:
            self._write(path, whole)
        return Result(line, outcome, time.monotonic() - began, printed)

    def _tested(self, tests: list[str]) -> tuple[Outcome, str]:
        status, printed = self._run([*_PYTEST, *self._options, *tests])
        if status is None:
            return Outcome.HUNG, printed
        return {0: Outcome.SURVIVED, _FAILED: Outcome.KILLED}.get(status, Outcome.INVALID), printed

    def _write(self, path: Path, text: str) -> str:
        """Write a source, and compile it if it is C; return what went wrong."""
        path.write_text(text)
        # Python knows by the time that bytecode is of an older source, and counts whole seconds.
        os.utime(path, (at := next(self._times), at))
        return compile_library(path, path.with_suffix(".so")) if path.suffix == ".c" else ""

    def _import_fault(self, path: Path) -> str:
        if path.suffix != ".py":
            return ""
        module = ".".join(path.relative_to(self._folder).with_suffix("").parts[1:]).removesuffix(".__init__")
        status, printed = self._run(["-c", f"import {module}"])
        return printed if status else ""

    def _run(self, arguments: list[str], times: int = 1) -> tuple[int | None, str]:
        """Run Python; return its status, or None where its time was over, and what it printed. None of it stays."""
        path = os.pathsep.join(str(self._folder / each) for each in SOURCES)
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self._folder,
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        status: int | None = None
        try:
            printed, _ = process.communicate(timeout=self._seconds * times)
            status = process.returncode
        except subprocess.TimeoutExpired:
            printed = f"not over after {self._seconds * times:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return status, printed
