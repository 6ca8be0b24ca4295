"""The parts of a system on this machine: plan, folder, ports, and what is read of a service's log."""

import asyncio
import json
import signal
import socket
import stat
import threading
from collections.abc import Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tokenbus.cli import up
from tokenbus.cli.errors import CommandError
from tokenbus.cli.supervisor import Child, Service, ServiceEvent, Supervisor
from tokenbus.cli.system import Plan, environment_of, plan_for, runtime_folder
from tokenbus.settings import Settings
from tokenbus.worker import engine_kind


def plan(folder: Path, overrides: Mapping[str, object] | None = None, **given: Any) -> Plan:  # noqa: ANN401
    settings = Settings.load(environment={}, overrides=overrides or {})
    return plan_for(settings, folder, **{"engine": "synthetic", "roles": {"mixed": 1}, **given})


async def read(data: bytes) -> tuple[Child, list[ServiceEvent]]:
    events: list[ServiceEvent] = []
    child = Child(Service("mixed-0", ("worker",), {}, "connected", 1), events.append)
    output = asyncio.StreamReader()
    output.feed_data(data)
    output.feed_eof()
    await child.read(output)
    return child, events


async def test_log_lines_make_state_and_events() -> None:
    """The log of a service says when it is ready and where its metrics are; warnings and errors are reported."""
    lines = [
        {"level": "info", "event": "serving metrics", "logger": "metrics", "address": "http://127.0.0.1:1"},
        {"level": "info", "event": "connected", "logger": "worker", "processor": "p"},
        {"level": "info", "event": "connected", "logger": "worker", "processor": "p"},
        {"level": "warning", "event": "frame refused", "logger": "worker", "reason": "why", "times": 3},
        {"level": "error", "event": "step failed", "exception": "Traceback ...\nValueError: rows: at most 4, got 5"},
    ]
    child, events = await read("\n".join(map(json.dumps, lines)).encode())
    assert (child.state, child.metrics) == ("ready", "http://127.0.0.1:1")
    assert [(event.event, event.text, event.is_error) for event in events] == [
        ("ready", "ready", False),
        ("log", "frame refused: reason why, times 3", False),
        ("log", "step failed: ValueError: rows: at most 4, got 5", True),
    ]
    assert child.last_line == ": step failed: ValueError: rows: at most 4, got 5"
    child.status = -signal.SIGKILL  # somebody killed it: the line before does not say why
    assert not child.last_line


async def test_anything_can_be_read() -> None:
    """Bytes that are no text, JSON that is no object, and a line without an end harm nobody."""
    child, events = await read(b"\xff\x00\n[1]\n\n" + b"x" * 3_000_000)
    assert not events
    assert len(child.last_line) <= 1_048_576
    child, _ = await read(b"tokenbus: \x1b[2Jcleared\n\n")
    assert child.last_line == r": \x1b[2Jcleared"
    child, _ = await read(b"before\ntokenbus: why\nlibrary: gone\n")
    assert child.last_line == ": why"


def test_services_get_exactly_the_settings() -> None:
    overrides: dict[str, object] = {"bus.key_file": "a b=c", "bus.insecure": True, "worker.policy": "shed"}
    settings = Settings.load(environment={}, overrides={**overrides, "processor.id": "p", "limits.max_rows": 64})
    assert Settings.load(environment=environment_of(settings, {})) == settings
    changed = environment_of(settings, {"worker.id": "other", "bus.insecure": False})
    assert Settings.load(environment=changed).worker.id == "other"
    assert Settings.load(environment=changed).bus.insecure is False


def test_addresses_that_were_set_stay(tmp_path: Path) -> None:
    """Defaults become sockets in the folder; an address that was set stays, and its service reports what is wrong."""
    chosen = {"bus.workers_address": "tcp://0.0.0.0:7000", "processor.metrics_address": "127.0.0.1:7001"}
    made = plan(tmp_path, chosen, roles={"mixed": 1, "decode": 1, "prefill": 1}, port=1)
    bus = made.settings.bus
    assert (bus.workers_address, bus.clients_address) == ("tcp://0.0.0.0:7000", f"ipc://{tmp_path}/clients")
    assert made.settings.processor.metrics_address == "127.0.0.1:7001"
    assert [service.name for service in made.services] == ["processor", "mixed-0", "decode-0", "prefill-0", "gateway"]
    assert Settings.load(environment=made.services[-1].environment).gateway.address == "127.0.0.1:1"


def test_gateways_share_a_port(tmp_path: Path) -> None:
    made = plan(tmp_path, {"gateway.address": "127.0.0.1:0", "gateway.metrics_address": "0.0.0.0:9100"}, gateways=3)
    gateways = [Settings.load(environment=service.environment).gateway for service in made.services[-3:]]
    assert [service.name for service in made.services[-3:]] == ["gateway-0", "gateway-1", "gateway-2"]
    assert len({gateway.address for gateway in gateways}) == 1
    assert not gateways[0].address.endswith(":0")
    assert all(gateway.reuse_port and gateway.metrics_address == "0.0.0.0:0" for gateway in gateways)


def test_default_address_that_is_taken_gets_any_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = plan(tmp_path).settings.processor.metrics_address
    assert free in (Settings().processor.metrics_address, "127.0.0.1:0")

    def refuse(_: object) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert plan(tmp_path).settings.processor.metrics_address == "127.0.0.1:0"


def test_model_in_a_folder(tmp_path: Path) -> None:
    """Workers get the model's folder and the engine's own options; the gateway has the folder's tokenizer."""
    made = plan(tmp_path, engine="vllm", model=tmp_path / "model", ranks=[["--max-model-len", "64"]])
    _, worker, gateway = made.services
    model = str(tmp_path / "model")
    assert worker.arguments == ("worker", "--engine", "vllm", "--model", model, "--", "--max-model-len", "64")
    assert Settings.load(environment=gateway.environment).gateway.tokenizer == model


def test_banner_says_how_to_ask(tmp_path: Path) -> None:
    """Also without a gateway: over the bus, with the tokenizer of the engine."""
    lines = list(up._up_lines(plan(tmp_path), [], ""))
    ask = f"tokenbus ask --clients-address ipc://{tmp_path}/clients --tokenizer numbers 'The old man'"
    assert f"  ask     {ask}" in lines


def test_each_rank_is_a_worker(tmp_path: Path) -> None:
    ranks = engine_kind("vllm").ranks(["-dp", "2", "--max-model-len", "64"])
    made = plan(tmp_path, engine="vllm", roles={"mixed": 4}, ranks=ranks)
    shared = ("worker", "--engine", "vllm", "--", "-dp", "2", "--max-model-len", "64", "--data-parallel-rank")
    assert [(worker.name, worker.arguments) for worker in made.services[1:-1]] == [
        (f"mixed-{number}", (*shared, str(number % 2))) for number in range(4)
    ]


def test_runtime_folder_is_private_and_made_where_it_can_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that takes no folder, or whose path leaves no room for sockets, is passed over for the next."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc")
    monkeypatch.setenv("TMPDIR", str(folder))
    with runtime_folder() as made:
        assert made.parent == folder
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert list(folder.iterdir()) == []
    long = folder / ("long" * 20)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    with runtime_folder() as made:
        assert made.parent not in (long, folder)


async def test_service_that_takes_too_long_is_told(folder: Path) -> None:
    services = plan(folder, {"processor.metrics_address": ""}).services
    system = Supervisor(services, folder, lambda _: None, start_seconds=0)
    with pytest.raises(CommandError, match=r"^processor: not ready after 0 s.* \(up --start-seconds\)"):
        await system.run(never)
    assert [child.state for child in system.children][:2] == ["ended", "starting"]


async def test_reader_that_goes_away_stops_the_system(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BrokenPipeError

    screen = up.Screen(as_json=True)
    screen.system = system = Supervisor([], folder, screen.service)
    monkeypatch.setattr("builtins.print", fail)
    screen.tell("started", "a line")
    assert system.stopping.is_set()
    assert isinstance(screen.failure, BrokenPipeError)


async def test_service_runs_no_module_of_the_current_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that has the name of a library that services import is not run, wherever they are started."""
    (tmp_path / "structlog.py").write_text("raise SystemExit('another structlog')")
    (tmp_path / "numpy.py").write_text("raise SystemExit('another numpy')")
    monkeypatch.chdir(tmp_path)
    child = Child(replace(plan(folder).services[0], arguments=("processor", "--help")), lambda _: None)
    await child.start(folder)
    assert child.ended is not None
    await child.ended
    assert (child.status, "another" in child.last_line) == (0, False)


async def never() -> None:
    raise AssertionError("it started")


class _Readyz(BaseHTTPRequestHandler):
    answers: ClassVar[list[list[str] | None]]
    """What is wrong, one time after the other; None: it does not say."""

    def do_GET(self) -> None:
        problems = self.answers.pop(0)
        self.send_response(503 if problems != [] else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"status": "?"} if problems is None else {"problems": problems}).encode())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


async def test_it_is_up_when_a_request_would_be_answered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it says what it waits for, once for each reason that lasts."""
    monkeypatch.setattr(up, "_READY_SECONDS", 0)
    monkeypatch.setattr(up, "_SOON", 1)
    _Readyz.answers = [["soon over"], ["no worker"], ["no worker"], None, []]
    with ThreadingHTTPServer(("127.0.0.1", 0), _Readyz) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        gateway: Any = SimpleNamespace(
            service=SimpleNamespace(arguments=["gateway"]),
            address=f"http://127.0.0.1:{server.server_port}",
            **dict.fromkeys(("name", "pid", "state", "metrics"), ""),
        )
        plan: Any = SimpleNamespace(settings=Settings.load(environment={}))
        system: Any = SimpleNamespace(children=[gateway])
        await up._show(plan, system, up.Screen(as_json=True))
        server.shutdown()
        serving.join()
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event.get("text") for event in events[:-1]] == ["waiting: no worker", "waiting: no worker takes requests"]
    assert events[-1]["event"] == "up"
