"""Plan: which services make up a system on this machine, and with which settings each of them runs."""

import importlib.util
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import SystemRandom

from tokenbus_services.cli.errors import WRONG_USE, CommandError
from tokenbus_services.settings import ENTRIES, Settings
from tokenbus_services.worker import engine_kind

_VARIABLES = {entry.variable for entry in ENTRIES.values()} | {"TOKENBUS_SETTINGS"}
_ANY_PORT = "127.0.0.1:0"
_GRACE_SECONDS = 1.0
_MODEL = "tokenbus"
"""As which the gateway lists workers whose model has no name."""


@dataclass(frozen=True, slots=True)
class Service:
    """One child process: what it is called, what it runs, and how it is waited for."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    ready_event: str
    """What it logs once it is of use."""
    stop_seconds: float
    """How long it may take to leave after SIGTERM."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The services of a system, in the order in which they start; they stop the other way round."""

    settings: Settings
    """What a client of the system needs: the addresses above all."""
    processor: Service
    workers: tuple[Service, ...]
    model: str
    """What requests ask for."""
    gateway: Service | None = None
    gateway_address: str = ""
    """Where the gateway serves, if there is one."""


def plan_for(  # noqa: PLR0913 - each but the first two is given by name
    settings: Settings,
    folder: Path,
    *,
    engine: str,
    mixed: int,
    prefill: int,
    decode: int,
    gateway_address: str = "",
    model: Path | None = None,
    ranks: Sequence[Sequence[str]] = ((),),
) -> Plan:
    """Return the plan of a processor, some workers of each role, and a gateway if it has an address.

    `model` is the folder of an engine that reads one, and the gateway has its tokenizer; `ranks` are the engine's own
    options for each of its data-parallel ranks, which the workers are in turn. Addresses that are the defaults become
    sockets in the folder and free ports; what was set stays as it is.
    """
    shared = _with_addresses(settings, folder)
    arguments = ["worker", "--engine", engine]
    if named := model or settings.worker.model:
        arguments += ["--model", str(named)]
    own = [["--", *options] if options else [] for options in ranks]
    workers = [
        _worker(shared, folder, f"{role}-{number}", role, [*arguments, *own[number % len(own)]])
        for role, count in (("mixed", mixed), ("decode", decode), ("prefill", prefill))
        for number in range(count)
    ]
    bus = shared.bus
    processor = Service(
        "processor",
        ("processor",),
        environment_of(shared),
        "listening",
        (shared.processor.drain_timeout_ms + bus.linger_ms) / 1000 + _GRACE_SECONDS,
    )
    tokenizer = engine_kind(engine).tokenizer if model is None else str(model.resolve())
    gateway = _gateway(shared, tokenizer, gateway_address) if gateway_address else None
    return Plan(shared, processor, tuple(workers), settings.worker.model or _MODEL, gateway, gateway_address)


def environment_of(settings: Settings, changed: Mapping[str, object] | None = None) -> dict[str, str]:
    """Return this process's environment with exactly some settings, and others changed by their keys."""
    given = changed or {}
    ours = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    for key, entry in ENTRIES.items():
        value = given.get(key, entry.value_in(settings))
        if value != entry.default:
            ours[entry.variable] = str(value).lower() if isinstance(value, bool) else str(value)
    return ours


def _with_addresses(settings: Settings, folder: Path) -> Settings:
    bus = settings.bus
    if bus.workers_address == ENTRIES["bus.workers_address"].default:
        bus = replace(bus, workers_address=f"ipc://{folder}/workers")
    if bus.clients_address == ENTRIES["bus.clients_address"].default:
        bus = replace(bus, clients_address=f"ipc://{folder}/clients")
    metrics = replace(settings.metrics, address=usable("metrics.address", settings.metrics.address))
    # The services' log lines are read by this process.
    log = replace(settings.log, format="json", level="info")
    return replace(settings, bus=bus, metrics=metrics, log=log)


def _worker(settings: Settings, folder: Path, name: str, role: str, arguments: Sequence[str]) -> Service:
    given: dict[str, object] = {"worker.id": name, "worker.role": role, "worker.metrics_address": _ANY_PORT}
    if settings.worker.handoff_address == ENTRIES["worker.handoff_address"].default:
        given["worker.handoff_address"] = f"ipc://{folder}/{name}"
    drains = 2 * settings.worker.drain_timeout_ms  # for its requests, then for their acknowledgement
    return Service(
        name,
        tuple(arguments),
        environment_of(settings, given),
        "connected",
        (drains + settings.bus.linger_ms) / 1000 + _GRACE_SECONDS,
    )


def _gateway(settings: Settings, tokenizer: str, address: str) -> Service:
    given: dict[str, object] = {"gateway.address": address}
    if settings.gateway.tokenizer == ENTRIES["gateway.tokenizer"].default:
        given["gateway.tokenizer"] = tokenizer
    drains = settings.gateway.drain_timeout_ms + settings.client.drain_timeout_ms + settings.bus.linger_ms
    return Service(
        "gateway",
        ("gateway",),
        environment_of(settings, given),
        "listening",
        drains / 1000 + _GRACE_SECONDS,
    )


_HOST = "127.0.0.1"
_PORTS, _TRIES = range(20_000, 32_000), 16
"""Below what systems give to outgoing connections, one of which could take a port before its service listens there."""
_NEEDS = ("tokenbus_services.cli.gateway", "starlette", "uvicorn", "orjson")


def gateway_address(settings: Settings, port: int | None) -> str:
    """Return where a gateway is to serve, or nothing if none can run here; then a port must not be asked for."""
    lacking = gateway_lacks()
    if lacking:
        if port is not None:
            raise CommandError(f"--port: no gateway can run here, {lacking} is not installed", WRONG_USE)
        return ""
    return usable("gateway.address", settings.gateway.address) if port is None else f"{_HOST}:{port}"


def usable(key: str, address: str) -> str:
    """Return an address with a known port: a default that is taken, and port 0, become free ones.

    Another address stays as it is; if it is taken, the service that listens there reports that.
    """
    is_open = address == ENTRIES[key].default or address.endswith(":0")
    return free_address(address) if is_open else address


def gateway_lacks() -> str:
    """Return the module without which no gateway can run here, or nothing."""
    return next((name for name in _NEEDS if importlib.util.find_spec(name) is None), "")


def free_address(wanted: str) -> str:
    """Return an address if its port is free, else one with another port of that host that is."""
    host, _, port = wanted.rpartition(":")
    wished = [int(port)] if int(port) else []
    for number in (*wished, *SystemRandom().sample(_PORTS, _TRIES), 0):
        try:
            with socket.create_server((host.strip("[]"), number)) as server:
                return f"{host}:{server.getsockname()[1]}"
        except OSError:
            continue
    return wanted  # its own process tells what is wrong with it
