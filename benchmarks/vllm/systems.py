"""The two systems, each as the processes that one would start: vLLM's API server, and Tokenbus with vLLM's engine."""

import json
import os
import signal
import socket
import subprocess
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.errors import NotRunError
from benchmarks.processes import below
from benchmarks.report import progress

VLLM, TOKENBUS = "vLLM", "Tokenbus"
ROOT = Path(__file__).resolve().parents[2]
_LAST_CHARACTERS = 4000
_LEAVE_SECONDS = 20.0
_START_SECONDS = 900.0
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
}
_CACHE = {"VLLM_CPU_KVCACHE_SPACE": "1"}
_LEAST_ROWS = 512


@dataclass(frozen=True, slots=True)
class Plan:
    """What both systems are started with."""

    python: str
    """The interpreter that has vLLM."""
    model: Path
    engine_options: Sequence[str]
    """vLLM's own, for both."""
    most_streams: int
    gateways: int = 1
    api_servers: int = 1


@dataclass(frozen=True, slots=True)
class System:
    """One that runs."""

    name: str
    addresses: Sequence[str]
    """Where it takes requests; clients spread over them."""
    roots: dict[str, list[int]] = field(default_factory=dict)
    """Its processes by their roles; others are below them."""

    def get(self, path: str, body: dict[str, Any] | None = None) -> Any:  # noqa: ANN401 - JSON
        return json.loads(_fetched(self.addresses[0], path, body) or "null")


@contextmanager
def running(plan: Plan, folder: Path) -> Iterator[dict[str, System]]:
    """Start both, one after the other, since on a card each measures how much memory is free, and end them."""
    with ExitStack() as stack:
        yield {VLLM: stack.enter_context(_vllm(plan, folder)), TOKENBUS: stack.enter_context(_tokenbus(plan, folder))}


@contextmanager
def _vllm(plan: Plan, folder: Path) -> Iterator[System]:
    address = _free_address()
    host, port = address.split(":")
    command = [
        *(plan.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(plan.model)),
        *("--served-model-name", plan.model.name, "--host", host, "--port", port),
        *(("--api-server-count", str(plan.api_servers)) if plan.api_servers > 1 else ()),
        *plan.engine_options,
    ]
    environment = environment_of(folder)
    with _started(command, environment, folder / "vllm.log") as process:
        system = System(VLLM, [address], {"API server": [process.pid]})
        _wait(system, "/health", [process], folder / "vllm.log")
        yield system


@contextmanager
def _tokenbus(plan: Plan, folder: Path) -> Iterator[System]:
    environment = environment_of(folder) | {
        "TOKENBUS_BUS_WORKERS_ADDRESS": f"ipc://{folder}/w",
        "TOKENBUS_BUS_CLIENTS_ADDRESS": f"ipc://{folder}/c",
        "TOKENBUS_DEAD_LETTERS_DIRECTORY": f"{folder}/dead",
        "TOKENBUS_METRICS_ADDRESS": "",
        "TOKENBUS_LOG_FORMAT": "json",
        # Beyond the defaults only where more streams are asked for than they allow.
        "TOKENBUS_LIMITS_MAX_ROWS": str(max(_LEAST_ROWS, plan.most_streams)),
    }
    addresses = [_free_address() for _ in range(plan.gateways)]
    # The command, of an interpreter that need not have its script.
    main = "import sys; from tokenbus_services.cli import main; sys.exit(main())"
    program, log = [plan.python, "-c", main], folder / "tokenbus.log"
    with ExitStack() as stack:

        def start(*arguments: str, **more: str) -> "subprocess.Popen[bytes]":
            return stack.enter_context(_started([*program, *arguments], environment | more, log))

        processor = start("processor")
        worker = start("worker", "--engine", "vllm", "--model", str(plan.model), "--", *plan.engine_options)
        gateways = [
            start("gateway", "--tokenizer", f"{plan.model}/", TOKENBUS_GATEWAY_ADDRESS=address) for address in addresses
        ]
        roots = {
            "gateway": [each.pid for each in gateways], "processor": [processor.pid], "worker": [worker.pid],
        }  # fmt: skip
        system = System(TOKENBUS, addresses, roots)
        _wait(system, "/readyz", [processor, worker, *gateways], log)
        yield system


def environment_of(folder: Path) -> dict[str, str]:
    """Return the environment of both; Tokenbus is this checkout's own, also where another or none is installed."""
    paths = [str(_described(folder)), *(str(ROOT / each) for each in ("", "contracts", "gpu_ops", "services"))]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TOKENBUS_")}
    before = [value] if (value := inherited.get("PYTHONPATH")) else []
    return {**_CACHE, **inherited, **_QUIET, "PYTHONPATH": os.pathsep.join([*paths, *before])}


def _described(folder: Path) -> Path:
    """Return a folder that says of the checkout what an installation says: its version and its entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    described = folder / "installed" / f"tokenbus-{project['version']}.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tokenbus\nVersion: {project['version']}\n")
    groups = (
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())])
        for group, entries in project["entry-points"].items()
    )
    (described / "entry_points.txt").write_text("\n\n".join(groups) + "\n")
    return described.parent


@contextmanager
def _started(command: Sequence[str], environment: dict[str, str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process until the end of the block, and end what is below it with it."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    try:
        yield process
    finally:
        left = list(below(process.pid))
        process.terminate()
        try:
            process.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid in left[1:]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _wait(system: System, path: str, processes: Sequence["subprocess.Popen[bytes]"], log: Path) -> None:
    """Wait until all addresses answer; a NotRunError has the end of the log if a process ends before."""
    progress(f"{system.name} starts")
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        try:
            for address in system.addresses:
                _fetched(address, path)
        except (OSError, urllib.error.URLError):
            time.sleep(0.2)
        else:
            return
    raise NotRunError(f"{system.name} did not start; its log ends with:\n{log.read_text()[-_LAST_CHARACTERS:]}")


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
