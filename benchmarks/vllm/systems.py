"""The two systems, each as the processes that one would start: vLLM's API server, and Tokenbus with vLLM's engine."""

import json
import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.errors import NotRunError
from benchmarks.processes import below, deployed
from benchmarks.report import progress
from tests.integration.deployment import Deployment
from tests.integration.programs import Program

VLLM, TOKENBUS = "vLLM", "Tokenbus"
_START_SECONDS = 900.0
_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # else each system wants most of a CPU's memory
}
_LEAST_ROWS = 512
_MAIN = "import sys; from tokenbus_services.cli import main; sys.exit(main())"


class Plan(NamedTuple):
    """What both systems are started with."""

    model: Path
    engine_options: Sequence[str]
    """vLLM's own, for both."""
    most_streams: int
    gateways: int = 1
    api_servers: int = 1


class System(NamedTuple):
    """One that runs."""

    name: str
    addresses: Sequence[str]
    """Where it takes requests; clients spread over them."""
    roots: dict[str, list[Program]]
    """Its processes by their roles; others are below them."""

    def get(self, path: str, body: dict[str, Any] | None = None) -> Any:  # noqa: ANN401 - JSON
        """Return what it answers to a request without a stream."""
        return json.loads(_fetched(self.addresses[0], path, body) or "null")


@contextmanager
def running(plan: Plan) -> Iterator[dict[str, System]]:
    """Start both, one after the other, since on a card each measures how much memory is free, and end them."""
    os.environ |= {name: value for name, value in _VARIABLES.items() if name not in os.environ}
    with deployed(limits__max_rows=max(_LEAST_ROWS, plan.most_streams)) as deployment, ExitStack() as stack:
        systems = {}
        for start in (_vllm, _tokenbus):
            started = start(plan, deployment)
            stack.callback(_end, started)
            _wait(started, "/health" if started.name == VLLM else "/readyz")
            systems[started.name] = started
        yield systems


def _vllm(plan: Plan, deployment: Deployment) -> System:
    address = _free_address()
    host, port = address.split(":")
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(plan.model)),
        *("--served-model-name", plan.model.name, "--host", host, "--port", port),
        *(("--api-server-count", str(plan.api_servers)) if plan.api_servers > 1 else ()),
        *plan.engine_options,
    ]
    return System(VLLM, [address], {"API server": [deployment.start("vllm", command)]})


def _tokenbus(plan: Plan, deployment: Deployment) -> System:
    worker = ["worker", "--engine", "vllm", "--model", str(plan.model), "--", *plan.engine_options]
    addresses = [_free_address() for _ in range(plan.gateways)]

    def start(*arguments: str, **settings: object) -> Program:
        # Not the command's script, which tests fork from a process with other imports: vLLM is not forked either.
        return deployment.start(arguments[0], [sys.executable, "-c", _MAIN, *arguments], **settings)

    roots = {
        "gateway": [start("gateway", "--tokenizer", f"{plan.model}/", gateway__address=each) for each in addresses],
        "processor": [start("processor")],
        "worker": [start(*worker)],
    }
    return System(TOKENBUS, addresses, roots)


def _end(system: System) -> None:
    """Kill all of its processes, and those that they started."""
    for program in (each for programs in system.roots.values() for each in programs):
        # First what it started: that holds its output open, whose end `kill` waits for.
        for pid in list(below(program.pid))[1:]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        program.kill()


def _wait(system: System, path: str) -> None:
    """Wait until all addresses answer; a NotRunError has the end of the log if a process ends before."""
    progress(f"{system.name} starts")
    programs = [each for programs in system.roots.values() for each in programs]
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and all(each.is_running for each in programs):
        with suppress(OSError):
            for address in system.addresses:
                _fetched(address, path)
            return
        time.sleep(0.2)
    logs = "\n".join(each.output for each in programs if not each.is_running)
    raise NotRunError(f"{system.name} did not start; its log ends with:\n{logs[-4000:]}")


def _fetched(address: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{address}{path}", data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - as above
        found: bytes = answer.read()
    return found


def _free_address() -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{bound.getsockname()[1]}"
