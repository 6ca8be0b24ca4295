"""A command that starts others, as a test sees it: its lines as they come, and whether its children still run."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.cli.helpers import COMMAND
from tests.support.processes import start
from tests.support.waiting import MOST, wait_until
from tests.system.programs import Program
from tokenbus.settings import ENTRIES

FEW = ["--engine", "synthetic", "--prefill", "0", "--decode", "0"]
"""A system that starts quickly."""
_LONGEST = 4 * MOST


def environment(folder: Path, **settings: object) -> dict[str, str]:
    """Return the environment of a command whose runtime folders are in one of a test's own."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("TOKENBUS_")}
    given = {ENTRIES[key.replace("__", ".")].variable: str(value) for key, value in settings.items()}
    own = {
        "TOKENBUS_GATEWAY_ADDRESS": "127.0.0.1:0",
        "TOKENBUS_PROCESSOR_METRICS_ADDRESS": "127.0.0.1:0",
        "XDG_RUNTIME_DIR": str(folder),
    }
    return ours | own | given


class Command(Program):
    """`tokenbus` with some arguments; its children end with it."""

    def __init__(self, arguments: list[str], variables: Mapping[str, str], program: list[str] | None = None) -> None:
        super().__init__("tokenbus", start([*(program or [str(COMMAND)]), *arguments], variables), _LONGEST)

    def event(self, event: str) -> dict[str, Any]:
        while True:
            found: dict[str, Any] = json.loads(self.line("{"))
            if found["event"] == event:
                return found

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until something holds that nothing announces; fail if the command ends before, or it takes too long."""

        def holds() -> object:
            found = condition()
            assert found or self.is_running, "it ended before"
            return found

        wait_until(holds, _LONGEST)


def children_of(pid: int) -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has just ended
            continue
        if int(fields[1]) == pid:
            yield int(folder.name), command


def is_running(pid: int) -> bool:
    """Return whether a process runs; one that has ended and that nobody asked for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]
