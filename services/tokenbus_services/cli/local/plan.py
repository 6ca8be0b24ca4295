"""Plan: which services make up a system on this machine, and with which settings each of them runs."""

import importlib.util
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import SystemRandom

from tokenbus_services.cli.errors import WRONG_USE, CommandError
from tokenbus_services.cli.local.supervisor import Service
from tokenbus_services.settings import ENTRIES, Settings
from tokenbus_services.worker import engine_kind

_VARIABLES = {entry.variable for entry in ENTRIES.values()} | {"TOKENBUS_SETTINGS"}
# In which order they start. The gateway comes before the workers, which may take minutes: it takes its port soon after
# that was chosen, and a tokenizer that it cannot use is reported at once; its /readyz fails until a worker is there.
# Decode workers come before prefill workers, whose requests go on there.
_PROCESSOR, _GATEWAY, _DECODE, _OTHERS = range(4)
_ANY_PORT = "127.0.0.1:0"
_GRACE_SECONDS = 1.0
_MODEL = "tokenbus"
"""As which the gateway lists workers whose model has no name."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The services of a system on this machine, and what its clients need to know."""

    settings: Settings
    """A client's settings: the addresses above all."""
    services: tuple[Service, ...]
    """Processor, workers and gateway, in the order in which they are shown."""
    model: str
    """What requests ask for."""
    gateway_address: str = ""
    """Where the gateway serves; empty: there is none."""


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
    drain = shared.processor.drain_timeout_ms
    processor = Service(
        "processor",
        ("processor",),
        environment_of(shared),
        "listening",
        _stop_seconds(shared, drain),
        starts=_PROCESSOR,
        stops=2,
    )
    arguments = ["worker", "--engine", engine]
    if named := model or settings.worker.model:
        arguments += ["--model", str(named)]
    commands = [(*arguments, *(["--", *options] if options else [])) for options in ranks]
    workers = [
        _worker(shared, folder, role, number, commands[number % len(commands)])
        for role, count in (("mixed", mixed), ("decode", decode), ("prefill", prefill))
        for number in range(count)
    ]
    tokenizer = engine_kind(engine).tokenizer if model is None else str(model.resolve())
    gateways = [_gateway(shared, tokenizer, gateway_address)] if gateway_address else []
    return Plan(shared, (processor, *workers, *gateways), settings.worker.model or _MODEL, gateway_address)


def _worker(settings: Settings, folder: Path, role: str, number: int, command: tuple[str, ...]) -> Service:
    name = f"{role}-{number}"
    given: dict[str, object] = {"worker.id": name, "worker.role": role, "worker.metrics_address": _ANY_PORT}
    if settings.worker.handoff_address == ENTRIES["worker.handoff_address"].default:
        given["worker.handoff_address"] = f"ipc://{folder}/{name}"
    drain = 2 * settings.worker.drain_timeout_ms  # for its requests, then for their acknowledgement
    starts = _DECODE if role == "decode" else _OTHERS
    stop_seconds = _stop_seconds(settings, drain)
    return Service(name, command, environment_of(settings, given), "connected", stop_seconds, starts, stops=1)


def _gateway(settings: Settings, tokenizer: str, address: str) -> Service:
    given: dict[str, object] = {"gateway.address": address}
    if settings.gateway.tokenizer == ENTRIES["gateway.tokenizer"].default:
        given["gateway.tokenizer"] = tokenizer
    stop_seconds = _stop_seconds(settings, settings.gateway.drain_timeout_ms + settings.client.drain_timeout_ms)
    return Service("gateway", ("gateway",), environment_of(settings, given), "listening", stop_seconds, _GATEWAY)


def _stop_seconds(settings: Settings, drain_ms: int) -> float:
    return (drain_ms + settings.bus.linger_ms) / 1000 + _GRACE_SECONDS


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
