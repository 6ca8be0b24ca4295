"""A revision's process, and the orders that it takes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from benchmarks.errors import NotRunError

ROOT = Path(__file__).resolve().parents[2]


class CodecOrder(NamedTuple):
    """So many calls of one operation on a batch."""

    rows: int
    tokens: int
    top_k: int | None
    """None: without logprobs."""
    operation: str = ""
    calls: int = 0

    @property
    def name(self) -> str:
        asked = "none" if self.top_k is None else self.top_k
        return f"{self.rows} x {self.tokens}, k = {asked}"


class BusOrder(NamedTuple):
    """So many steps from a worker's process to a processor's."""

    top_k: int
    steps: int


class Revision:
    """A process that imports the packages in one folder, or this tree's where there is none."""

    def __init__(self, packages: Path | None) -> None:
        path = [*([] if packages is None else [str(packages)]), str(ROOT)]
        if packages is None:
            path += [entry for entry in sys.path if entry]
        self._process = subprocess.Popen(
            [sys.executable, "-P", Path(__file__).with_name("program.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def take(self, order: CodecOrder | BusOrder) -> Any:  # noqa: ANN401 - a time, or two of the bus
        """Return the microseconds of processor time that an order took, each call or step."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None  # noqa: S101
        assert stdout is not None  # noqa: S101
        print(json.dumps([type(order).__name__, *order]), file=stdin, flush=True)
        if not (answer := stdout.readline()):
            raise NotRunError(f"{order}: one of the revisions cannot do it")
        return json.loads(answer)
