"""Saving and getting over a bus of a test's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.services.worker.fastdeploy import engine, model
from tokenbus_services.settings import Settings
from tokenbus_services.worker import fastdeploy


def settings_in(folder: Path, **overrides: object) -> Settings:
    """Return settings with addresses in a folder, as the drop-in has them where nothing is set."""
    usual: dict[str, object] = {
        "bus.workers_address": f"ipc://{folder}/w",
        "bus.clients_address": f"ipc://{folder}/c",
        "bus.reconnect_ms": 10,
        "bus.reconnect_max_ms": 50,
        "bus.linger_ms": 50,
        "worker.id": "fastdeploy-1",
        "worker.max_requests": 0,
        "worker.drain_timeout_ms": 0,
        "limits.max_rows": 1024,
        "processor.request_timeout_ms": 86_400_000,
        "processor.drain_timeout_ms": 0,
        "dead_letters.directory": f"{folder}/dead",
    }
    wanted = usual | {name.replace("__", "."): value for name, value in overrides.items()}
    return Settings.load(environment={}, overrides=wanted)


def as_tensors(values: list[Any]) -> list[Any]:
    """Return arguments with tensors in the place of arrays."""
    return [engine.Tensor(value) if isinstance(value, np.ndarray) else value for value in values]


def save(op: str, given: Mapping[Any, Any], *, tensors: bool = False) -> None:
    """Call a save op with its arguments by position; they are copied, as it may change them."""
    values = [value.copy() if isinstance(value, np.ndarray) else value for value in given.values()]
    getattr(fastdeploy, op)(*(as_tensors(values) if tensors else values))


class Getter:
    """Gets message after message into the same tensors, as the engine's token processor does, and checks each."""

    def __init__(self, op: str, *, tensors: bool = False, k: int = 20) -> None:
        """Make the tensors."""
        self.op = op
        self._k = [k] if op.endswith("_topk") else []
        self._expected = engine.outputs(op)
        made = engine.outputs(op)
        self.outputs: list[Any] = as_tensors(made) if tensors else made

    def get(self, *, wait: bool = True) -> None:
        """Get the next message."""
        getattr(fastdeploy, self.op)(*self.outputs, *self._k, 0, wait)

    def arrays(self) -> list[model.Array]:
        """Return what the tensors hold."""
        return [output if isinstance(output, np.ndarray) else output.numpy() for output in self.outputs]

    def check(self, sent: model.Sent) -> None:
        """Get the next message, and assert that every element is what that engine's queue would have given."""
        self.get()
        self.assume(sent)

    def assume(self, sent: model.Sent) -> None:
        """Assert that a message was got, and nothing else."""
        getattr(model, self.op)(sent, *self._expected, *self._k)
        for found, expected in zip(self.arrays(), self._expected, strict=True):
            np.testing.assert_array_equal(found, expected)
