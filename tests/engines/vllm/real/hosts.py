"""Processes that run models: each is forked from one that has imported vLLM, and calls what the tests ask it to."""

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial, wraps
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tests.support.fork_server import Request
from tests.support.processes import Forked
from tokenbus.engines.vllm import VllmEngine
from tokenbus.settings import Settings

Result = TypeVar("Result")
_engine: VllmEngine
"""The engine of this process."""


class Host:
    """A process that calls functions, one at a time."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        request = Request([sys.executable, "-m", "tests.engines.vllm.real.hosts"], dict(os.environ), str(Path.cwd()))
        with theirs:
            self._process = Forked(request, [theirs.fileno(), 1, 2])
        self._calls = Connection(ours.detach())

    def __call__(self, function: Callable[..., Result], *arguments: object) -> Result:
        self._calls.send((function, arguments))
        has_failed, result = self._calls.recv()
        assert not has_failed, result
        returned: Result = result
        return returned

    def close(self) -> None:
        self._calls.close()
        self._process.wait()


class EngineHost(Host):
    def __init__(self, model: Path, arguments: Sequence[str], role: str = "mixed") -> None:
        super().__init__()
        super().__call__(_start, model, arguments, role)

    def __call__(self, function: Callable[..., Result], *arguments: object) -> Result:
        result: Result = super().__call__(_with_engine, function, arguments)
        return result


def apart(function: Callable[..., Result], *arguments: object) -> Result:
    """Call a function in a process of its own."""
    with closing(Host()) as host:
        return host(function, *arguments)


def in_its_process(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in the process of its fixture `engine`, with the engine itself."""

    @wraps(test)
    def run(engine: EngineHost, **given: object) -> None:
        engine(_run, test.__module__, test.__name__, given)

    return run


def _start(model: Path, arguments: Sequence[str], role: str) -> None:
    global _engine  # noqa: PLW0603 - a process has one
    executor: Any = import_module("vllm.v1.executor.multiproc_executor")
    executor.get_mp_context = partial(
        multiprocessing.get_context, "fork"
    )  # as on a card: its processes have the imports
    _engine = VllmEngine(model, arguments, Settings.load(environment={}, overrides={"worker.role": role}))


def _with_engine(function: Callable[..., Result], arguments: Sequence[object]) -> Result:
    return function(_engine, *arguments)


def _run(engine: VllmEngine, module: str, name: str, given: Mapping[str, Any]) -> None:
    getattr(import_module(module), name).__wrapped__(engine=engine, **given)


def _serve(calls: Connection) -> NoReturn:
    import torch

    torch.cpu._init_amx()  # vLLM's attention in bfloat16 uses what a process may only use that has asked for it
    while True:
        try:
            function, arguments = calls.recv()
        except EOFError:
            os._exit(0)  # what has imported vLLM ends for a second, and with complaints
        try:
            answer = False, function(*arguments)
        except BaseException:  # noqa: BLE001 - also what pytest raises
            answer = True, traceback.format_exc()
        calls.send(answer)


if __name__ == "__main__":
    _serve(Connection(os.dup(0)))
