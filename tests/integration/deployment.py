"""A deployment of a test's own: short addresses in a folder of its own, settings, and processes that end with it."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.integration.programs import Program
from tokenbus_services.settings import Settings

Overrides = Mapping[str, object]


class Deployment:
    """Addresses and settings that a processor, workers and clients share."""

    def __init__(self, folder: Path, overrides: Overrides | None = None) -> None:
        """Take a folder with a short path, and what differs from the settings below."""
        self.folder = folder
        self.overrides: dict[str, object] = {
            "bus.workers_address": f"ipc://{folder}/w",
            "bus.clients_address": f"ipc://{folder}/c",
            "bus.heartbeat_interval_ms": 100,
            # Far above the interval: where many tests run, a process may stand still for a second.
            "bus.heartbeat_timeout_ms": 10_000,
            "bus.reconnect_ms": 10,
            "bus.reconnect_max_ms": 100,
            "bus.linger_ms": 200,
            "dead_letters.directory": f"{folder}/dead",
            "metrics.address": "",
            "log.format": "json",
            **(overrides or {}),
        }
        self._programs: list[Program] = []

    def settings(self, **overrides: object) -> Settings:
        """Return the settings, with a double underscore for the dot in a key."""
        return Settings.load(environment={}, overrides={**self.overrides, **_keys(overrides)})

    def environment(self, **overrides: object) -> dict[str, str]:
        """Return the settings as a process takes them."""
        ours = {key: value for key, value in os.environ.items() if not key.startswith("TOKENBUS_")}
        wanted = {**self.overrides, **_keys(overrides)}
        return ours | {f"TOKENBUS_{key.replace('.', '_').upper()}": str(value) for key, value in wanted.items()}

    def start_processor(self, *, before: Sequence[str] = (), **overrides: object) -> Program:
        """Start a processor, and return when it listens."""
        program = self.start("processor_program", (), before=before, **overrides)
        program.wait_for('"listening"')
        return program

    def start_worker(
        self, name: str = "worker-0", *arguments: str, before: Sequence[str] = (), **overrides: object
    ) -> Program:
        """Start a worker, and return when a processor has taken it."""
        program = self.start("worker_program", arguments, before=before, worker__id=name, **overrides)
        program.wait_for('"connected"')
        return program

    def start(
        self, module: str, arguments: Sequence[str], *, before: Sequence[str] = (), **overrides: object
    ) -> Program:
        """Start one of the programs beside this module."""
        program = Program(f"tests.integration.{module}", arguments, self.environment(**overrides), before)
        self._programs.append(program)
        return program

    def close(self) -> None:
        """End all that still runs."""
        for program in self._programs:
            program.kill()


def _keys(overrides: Overrides) -> dict[str, object]:
    return {name.replace("__", "."): value for name, value in overrides.items()}
