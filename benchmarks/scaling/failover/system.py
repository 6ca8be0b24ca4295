"""Two processors and some workers, each a process, and a client's requests that never end."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.programs import tokenbus, until_workers
from benchmarks.scaling.system import running
from tokenbus_services.client import Client, RequestEnd, StepRows

STEPS_PER_SECOND = "20"
_MOST_TOKENS = 100_000_000


class System:
    """Two processors and some workers."""

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        addresses: Sequence[Mapping[str, str]],
        workers: int,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Start all of them; `addresses` has each processor's for workers and for clients."""
        self._stack, self._folder, self._addresses = stack, folder, addresses
        self._settings = settings or {}
        self._workers = workers
        self.all = {
            f"bus.{kind}s_address": ",".join(dict.fromkeys(own[kind] for own in addresses))
            for kind in ("worker", "client")
        }
        self.processors = [self.start(place) for place in range(len(addresses))]
        for number in range(workers):
            command = ["worker", "--engine", "synthetic", "--steps-per-second", STEPS_PER_SECOND, "--id", f"w{number}"]
            self._run(command, self.all)

    def start(self, place: int) -> "subprocess.Popen[str]":
        """Start a processor."""
        own = {f"bus.{kind}s_address": address for kind, address in self._addresses[place].items()}
        return self._run(["processor"], {**own, "processor.id": f"p{place}"})

    async def begin(self, client: Client, requests: int) -> list[int]:
        """Return the keys of so many requests, submitted once all workers are there."""
        await until_workers(client, self._workers)
        return [client.submit([1], max_tokens=_MOST_TOKENS) for _ in range(requests)]

    def _run(self, command: Sequence[str], settings: Mapping[str, str]) -> "subprocess.Popen[str]":
        given = {**self._settings, **settings, "metrics.address": "", "dead_letters.directory": f"{self._folder}/dead"}
        variables = {f"TOKENBUS_{key.replace('.', '_').upper()}": value for key, value in given.items()}
        return self._stack.enter_context(running([*tokenbus(), *command], os.environ | variables, self._folder / "log"))


def keys_of(output: StepRows | RequestEnd) -> list[int]:
    """Return the requests that have rows in what came; a request that ended ends the measurement."""
    if isinstance(output, RequestEnd):
        raise SystemExit(f"a request ended: {output.error}")
    keys: list[int] = output.target.request_keys.tolist()
    return keys
