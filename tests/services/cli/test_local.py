"""The parts of a system on this machine: plan, folder, ports, and what is read of a service's log."""

import asyncio
import json
import stat
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from socket import create_server

import pytest

from tokenbus_contracts.generated.client_pb2 import ProcessorStatus
from tokenbus_services.cli.errors import CommandError
from tokenbus_services.cli.local import Child, News, Service, StartError, Supervisor
from tokenbus_services.cli.local import plan as plan_module
from tokenbus_services.cli.local.plan import environment_of, free_address, plan_for, usable
from tokenbus_services.cli.local.runtime import runtime_folder
from tokenbus_services.cli.local.screen import Screen, status_line
from tokenbus_services.settings import Settings
from tokenbus_services.worker import engine_kind


async def read(data: bytes) -> tuple[Child, list[News]]:
    """Return a child that wrote some bytes, and what was told of them."""
    told: list[News] = []
    child = Child(Service("mixed-0", ("worker",), {}, "connected", 1), told.append)
    stream = asyncio.StreamReader()
    stream.feed_data(data)
    stream.feed_eof()
    await child._read(stream)
    return child, told


async def test_log_lines_make_state_and_news() -> None:
    """What a service logs says when it is ready and where its metrics are; warnings are told, the rest is not."""
    lines = [
        {"level": "info", "event": "serving metrics", "logger": "metrics", "address": "http://127.0.0.1:1"},
        {"level": "info", "event": "connected", "logger": "worker", "processor": "p"},
        {"level": "info", "event": "connected", "logger": "worker", "processor": "p"},
        {"level": "warning", "event": "frame refused", "logger": "worker", "reason": "why", "times": 3},
        {"level": "error", "event": "step failed", "exception": "Traceback ...\nValueError: rows: at most 4, got 5"},
    ]
    child, told = await read("\n".join(map(json.dumps, lines)).encode())
    assert (child.state, child.metrics) == ("ready", "http://127.0.0.1:1")
    assert [(news.event, news.text, news.is_bad) for news in told] == [
        ("ready", "ready", False),
        ("log", "frame refused: reason why, times 3", False),
        ("log", "step failed: ValueError: rows: at most 4, got 5", True),
    ]
    assert child.last_line == ": step failed: ValueError: rows: at most 4, got 5"


async def test_anything_can_be_read() -> None:
    """Bytes that are no text, JSON that is no object, and a line without an end harm nobody."""
    child, told = await read(b"\xff\x00\n[1]\n\n" + b"x" * 3_000_000)
    assert not told
    assert len(child.last_line) <= 1_048_576
    child, _ = await read(b"tokenbus: \x1b[2Jcleared\n\n")
    assert child.last_line == r": \x1b[2Jcleared"


def test_screen_is_silent_after_its_reader_went_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line that cannot be printed is noted and told once; nothing is tried after it."""
    tried: list[str] = []

    def refuse(text: str, **_: object) -> None:
        tried.append(text)
        raise BrokenPipeError

    failures: list[str] = []
    screen = Screen(as_json=False)
    screen.on_failure = lambda: failures.append("told")
    monkeypatch.setattr("builtins.print", refuse)
    screen.put("one")
    screen.put("two")
    assert (tried, failures) == (["one"], ["told"])
    assert isinstance(screen.failure, BrokenPipeError)


def test_status_as_a_line() -> None:
    """The status is one line, with the rate that was measured since the one before."""
    status = ProcessorStatus(open_requests=2, finished_requests=1500, failed_requests=1, tokens=1500)
    line = "2 open requests, 1,500 finished, 1 failed, 1,500 tokens, 500 a second, 0 gaps"
    assert status_line(status, 500.0) == line


def test_without_its_libraries_no_gateway_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the extra is not installed a system comes up without a gateway, unless a port is asked for."""
    monkeypatch.setattr(plan_module, "gateway_lacks", lambda: "uvicorn")
    assert plan_module.gateway_address(Settings(), None) == ""
    with pytest.raises(CommandError, match="--port: no gateway can run here, uvicorn is not installed") as raised:
        plan_module.gateway_address(Settings(), 8000)
    assert raised.value.status == 2


def test_port_that_was_chosen_stays() -> None:
    """A default and port 0 become ports that can be told; an address that somebody chose is left to who listens."""
    assert usable("gateway.address", "127.0.0.1:1") == "127.0.0.1:1"
    assert not usable("gateway.address", "127.0.0.1:0").endswith(":0")


def test_services_get_exactly_the_settings() -> None:
    """What a service reads from its environment is what was loaded, whatever the surrounding environment says."""
    overrides: dict[str, object] = {"bus.key_file": "a b=c", "bus.insecure": True, "gateway.key_share": 0.25}
    settings = Settings.load(environment={}, overrides={**overrides, "processor.id": "p", "limits.max_rows": 64})
    assert Settings.load(environment=environment_of(settings)) == settings
    changed = environment_of(settings, {"worker.id": "other", "bus.insecure": False})
    assert Settings.load(environment=changed).worker.id == "other"
    assert Settings.load(environment=changed).bus.insecure is False


def test_addresses_that_were_set_stay(tmp_path: Path) -> None:
    """Defaults become sockets in the folder; an address that somebody chose is used as it is."""
    chosen = {"bus.workers_address": "tcp://0.0.0.0:7000", "metrics.address": "127.0.0.1:7001"}
    plan = plan_for(
        Settings.load(environment={}, overrides=chosen), tmp_path, engine="ngram", mixed=1, prefill=1, decode=1
    )
    bus = plan.settings.bus
    assert (bus.workers_address, bus.clients_address) == ("tcp://0.0.0.0:7000", f"ipc://{tmp_path}/clients")
    assert plan.settings.metrics.address == "127.0.0.1:7001"
    assert [service.name for service in plan.services] == ["processor", "mixed-0", "decode-0", "prefill-0"]


def test_model_in_a_folder(tmp_path: Path) -> None:
    """Workers get the model's folder and the engine's own options; the gateway has the folder's tokenizer."""
    plan = plan_for(
        Settings(),
        tmp_path,
        engine="vllm",
        mixed=1,
        prefill=0,
        decode=0,
        gateway_address="127.0.0.1:1",
        model=tmp_path / "model",
        ranks=[["--max-model-len", "64"]],
    )
    _, worker, gateway = plan.services
    model = str(tmp_path / "model")
    assert worker.arguments == ("worker", "--engine", "vllm", "--model", model, "--", "--max-model-len", "64")
    assert Settings.load(environment=gateway.environment).gateway.tokenizer == model


def test_each_rank_is_a_worker(tmp_path: Path) -> None:
    """Workers are the ranks of an engine in turn, each with an id and options of its own."""
    ranks = engine_kind("vllm").ranks(["-dp", "2", "--max-model-len", "64"])
    plan = plan_for(Settings(), tmp_path, engine="vllm", mixed=4, prefill=0, decode=0, ranks=ranks)
    shared = ("worker", "--engine", "vllm", "--", "-dp", "2", "--max-model-len", "64", "--data-parallel-rank")
    assert [(worker.name, worker.arguments) for worker in plan.services[1:]] == [
        (f"mixed-{number}", (*shared, str(number % 2))) for number in range(4)
    ]


def test_taken_port_is_replaced() -> None:
    """A preferred address whose port is taken becomes one with a port that is free."""
    with closing(create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        found = free_address(f"127.0.0.1:{port}")
    assert found.startswith("127.0.0.1:")
    assert found != f"127.0.0.1:{port}"
    assert free_address(found) == found


def test_free_port_stays_free() -> None:
    """A port that is found is none that an outgoing connection may be given before its service listens there."""
    ports = {int(free_address("127.0.0.1:0").rpartition(":")[2]) for _ in range(50)}
    assert max(ports) < 32_768
    assert len(ports) > 10


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


def test_no_place_for_sockets_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no place takes a folder a line says which were tried and why not."""
    monkeypatch.setattr("tempfile.mkdtemp", lambda **_: Path("/proc/tokenbus").mkdir())
    with pytest.raises(CommandError, match=r"no place for a folder of sockets \(XDG_RUNTIME_DIR, TMPDIR\): .*/tmp: "):
        runtime_folder().__enter__()


async def test_service_that_takes_too_long_is_told(folder: Path) -> None:
    """A service that is not ready in its time ends the start, and the line names the option that allows more."""
    settings = Settings.load(environment={}, overrides={"metrics.address": ""})
    plan = plan_for(settings, folder, engine="synthetic", mixed=1, prefill=0, decode=0)
    system = Supervisor(plan.services, folder, lambda _: None, start_seconds=0)
    with pytest.raises(StartError, match=r"^processor: not ready after 0 s \(up --start-seconds\)"):
        await system.__aenter__()
    assert [child.state for child in system.children] == ["ended", "starting"]


async def test_service_runs_no_module_of_the_current_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that has the name of a library that services import is not run, wherever they are started."""
    (tmp_path / "structlog.py").write_text("raise SystemExit('another structlog')")
    (tmp_path / "numpy.py").write_text("raise SystemExit('another numpy')")
    monkeypatch.chdir(tmp_path)
    plan = plan_for(Settings(), folder, engine="synthetic", mixed=1, prefill=0, decode=0)
    child = Child(replace(plan.services[0], arguments=("processor", "--help")), lambda _: None)
    await child.start(folder)
    assert child.ended is not None
    await child.ended
    assert (child.status, "another" in child.last_line) == (0, False)


async def test_service_that_cannot_be_started_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine gives no process a line says whose and why, and not that the output is at fault."""

    async def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    plan = plan_for(Settings(), folder, engine="synthetic", mixed=1, prefill=0, decode=0)
    with pytest.raises(StartError, match="processor: no process can be started: resource temporarily unavailable"):
        await Supervisor(plan.services, folder, lambda _: None).__aenter__()
