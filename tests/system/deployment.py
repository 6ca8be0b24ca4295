"""A deployment of a test's own: short addresses in a folder of its own, settings, and processes that end with it."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.processes import start
from tests.support.settings import environment_of, settings_of
from tests.support.waiting import MOST
from tests.system.programs import Program
from tokenbus.settings import Settings

COMMAND = str(Path(sys.executable).parent / "tokenbus")
Overrides = Mapping[str, Any]


class Deployment:
    """Addresses and settings that a processor, workers and clients share."""

    def __init__(self, folder: Path, overrides: Overrides | None = None, patience: float = MOST) -> None:
        self.folder, self._patience = folder, patience
        self.overrides: dict[str, object] = {
            "bus.workers_address": f"ipc://{folder}/w",
            "bus.clients_address": f"ipc://{folder}/c",
            "bus.heartbeat_ms": 100,
            # Far above the interval: where many tests run, a process may stand still for a second.
            "bus.heartbeat_timeout_ms": 10_000,
            "bus.reconnect_ms": 10,
            "bus.reconnect_max_ms": 100,
            "processor.metrics_address": "",
            "log.format": "json",
            **(overrides or {}),
        }
        self._programs: list[Program] = []

    def settings(self, **overrides: object) -> Settings:
        """Return the settings, with a double underscore for the dot in a key."""
        return settings_of({**self.overrides, **_keys(overrides)})

    def environment(self, **overrides: object) -> dict[str, str]:
        ours = {key: value for key, value in os.environ.items() if not key.startswith("TOKENBUS_")}
        return ours | environment_of({**self.overrides, **_keys(overrides)})

    def start_processor(self, *, is_awaited: bool = True, **overrides: object) -> Program:
        program = self.start("processor", [COMMAND, "processor"], **overrides)
        if is_awaited:
            program.wait_for('"listening"')
        return program

    def start_worker(self, name: str = "worker-0", *arguments: str, **overrides: object) -> Program:
        command = [COMMAND, "worker", "--engine", "synthetic", "--steps-per-second", "300", *arguments]
        program = self.start(name, command, worker__id=name, **overrides)
        program.wait_for('"connected"')
        return program

    def start_module(self, module: str, *arguments: str, **overrides: object) -> Program:
        return self.start(module, [sys.executable, "-m", f"tests.system.{module}", *arguments], **overrides)

    def start(self, name: str, command: Sequence[str], **overrides: object) -> Program:
        program = Program(name, start(command, self.environment(**overrides), is_merged=True), self._patience)
        self._programs.append(program)
        return program

    def close(self) -> None:
        for program in self._programs:
            program.kill()


def _keys(overrides: Overrides) -> dict[str, object]:
    return {name.replace("__", "."): value for name, value in overrides.items()}
