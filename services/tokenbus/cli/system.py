"""Plans the services of a system on this machine: settings, addresses, and the folder for sockets."""

import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenbus.cli.errors import CommandError
from tokenbus.cli.supervisor import Service
from tokenbus.printable import printable, reason_of
from tokenbus.settings import ENTRIES, Settings
from tokenbus.worker import engine_kind

_VARIABLES = {entry.variable for entry in ENTRIES.values()} | {"TOKENBUS_SETTINGS"}
_GRACE_MS = 1000
_MODEL = "tokenbus"
"""The name that the gateway gives to a model without a name."""
_LONGEST_FOLDER = 60
"""Maximum length of the folder's path. The path of a socket has at most 107 bytes on Linux and 103 elsewhere."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The services of a system on this machine, and the settings of the system's clients."""

    settings: Settings
    services: tuple[Service, ...]
    """The processor, the workers and the gateways in the order of display."""
    model: str
    """The name of the model in requests."""


def plan_for(  # noqa: PLR0913 - all but two are keyword-only
    settings: Settings,
    folder: Path,
    *,
    engine: str,
    roles: Mapping[str, int],
    gateways: int = 1,
    port: int | None = None,
    model: Path | None = None,
    ranks: Sequence[Sequence[str]] = ((),),
    steps_per_second: int = 0,
) -> Plan:
    """Plan a processor, the workers of each role, and gateways.

    Default bus addresses are replaced by sockets in the folder. All gateways share `port`. `model` is a model's
    folder, whose tokenizer the gateways also use. `ranks` has the engine's options for each data-parallel rank. Workers
    are assigned to the ranks in rotation. If `steps_per_second` is 0, the workers run at full speed.
    """
    shared = _shared(settings, folder, engine_kind(engine).tokenizer if model is None else str(model.resolve()))

    def service(name: str, command: Sequence[str], drain_ms: int, given: Mapping[str, object]) -> Service:
        ready = "connected" if command[0] == "worker" else "listening"
        stop_seconds = (drain_ms + shared.bus.linger_ms + _GRACE_MS) / 1000
        return Service(name, tuple(command), environment_of(shared, given), ready, stop_seconds)

    def workers(role: str, count: int) -> Iterator[Service]:
        drain_ms = 2 * shared.worker.drain_timeout_ms  # one timeout for open requests, one for acknowledgements
        command = ["worker", "--engine", engine]
        if model:
            command += ["--model", str(model)]
        elif settings.worker.model:
            command += ["--set", f"worker.model={settings.worker.model}"]
        if steps_per_second:
            command += ["--steps-per-second", str(steps_per_second)]
        for number in range(count):
            name, own = f"{role}-{number}", ranks[number % len(ranks)]
            given = {"worker.id": name, "worker.role": role, "worker.metrics_address": "127.0.0.1:0"}
            yield service(name, [*command, *(["--", *own] if own else [])], drain_ms, given)

    services = [
        service("processor", ["processor"], shared.processor.drain_timeout_ms, {}),
        *(worker for role, count in roles.items() for worker in workers(role, count)),
    ]
    given = _gateway_addresses(shared, port, gateways)
    drain_ms = shared.gateway.drain_timeout_ms + shared.client.drain_timeout_ms
    names = ["gateway"] if gateways == 1 else [f"gateway-{number}" for number in range(gateways)]
    services += [service(name, ["gateway"], drain_ms, given) for name in names]
    return Plan(shared, tuple(services), settings.worker.model or _MODEL)


def environment_of(settings: Settings, given: Mapping[str, object]) -> dict[str, str]:
    """Return this process's environment with all settings as variables. `given` overrides settings by key."""
    ours = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    for key, entry in ENTRIES.items():
        value = given.get(key, entry.value_in(settings))
        if value != entry.default:
            ours[entry.variable] = str(value).lower() if isinstance(value, bool) else str(value)
    return ours


def _shared(settings: Settings, folder: Path, tokenizer: str) -> Settings:
    """Return the settings of all services, with this system's own addresses and tokenizer in place of the defaults."""
    own = {
        "bus.workers_address": f"ipc://{folder}/workers",
        "bus.clients_address": f"ipc://{folder}/clients",
        "gateway.tokenizer": tokenizer,
    }
    given = {key: value for key, value in own.items() if _is_default(key, settings)}
    given["processor.metrics_address"] = _usable("processor.metrics_address", settings)
    given |= {"log.format": "json", "log.level": "info"}  # the supervisor parses the log lines of services
    return Settings.load(environment=environment_of(settings, given))


def _is_default(key: str, settings: Settings) -> bool:
    return bool(ENTRIES[key].value_in(settings) == ENTRIES[key].default)


def _usable(key: str, settings: Settings) -> str:
    """Return the address in a setting. If a default address is in use, replace its port by 0 (any free port)."""
    address = str(ENTRIES[key].value_in(settings))
    host, _, port = address.rpartition(":")
    if _is_default(key, settings):
        try:
            socket.create_server((host, int(port))).close()
        except OSError:
            return f"{host}:0"
    return address


def _gateway_addresses(settings: Settings, port: int | None, count: int) -> dict[str, object]:
    """Return the address settings of the gateways, which share an HTTP port but have separate metrics ports."""
    address = f"127.0.0.1:{port}" if port is not None else _usable("gateway.address", settings)
    if count <= 1:
        return {"gateway.address": address}
    host, _, number = address.rpartition(":")
    if number == "0":  # choose the port now, because all gateways must share it
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        with socket.create_server((host.strip("[]"), 0), family=family) as found:
            address = f"{host}:{found.getsockname()[1]}"
    metrics_host = settings.gateway.metrics_address.rpartition(":")[0] or "127.0.0.1"
    return {"gateway.address": address, "gateway.reuse_port": True, "gateway.metrics_address": f"{metrics_host}:0"}


@contextmanager
def runtime_folder() -> Iterator[Path]:
    """Create a private folder in XDG_RUNTIME_DIR, TMPDIR or /tmp, and remove the folder at the end of the block.

    If this process is killed, its services remove the folder.
    """
    named = [str(Path(name).absolute()) for each in ("XDG_RUNTIME_DIR", "TMPDIR") if (name := os.environ.get(each))]
    refusals = []
    for base in [*(name for name in named if len(os.fsencode(name)) <= _LONGEST_FOLDER), "/tmp"]:  # noqa: S108
        try:
            folder = tempfile.TemporaryDirectory(prefix="tokenbus-", dir=base, ignore_cleanup_errors=True)
        except OSError as error:
            refusals.append(printable(f"{base}: {reason_of(error)}"))
            continue
        with folder as name:
            yield Path(name)
        return
    raise CommandError(f"cannot create a folder for sockets (XDG_RUNTIME_DIR, TMPDIR): {', '.join(refusals)}")
