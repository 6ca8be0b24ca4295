"""The settings of a deployment as one frozen object, every setting by its key, and the rules between sections."""

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tokenbus_contracts import Limits
from tokenbus_services.backports import tomllib
from tokenbus_services.settings.errors import SettingsError, Shown, shown
from tokenbus_services.settings.kinds import Kind, kind_of, refuse
from tokenbus_services.settings.sections import (
    BusSettings,
    ClientSettings,
    ClientsSettings,
    DeadLetterSettings,
    DurableLogSettings,
    GatewaySettings,
    LogSettings,
    MetricsSettings,
    ProcessorSettings,
    WorkerSettings,
    limit_kind,
)

_HOLD_A_MESSAGE = (
    "bus.max_part_bytes",
    "worker.retention_bytes",
    "processor.credit_bytes",
    "clients.send_queue_bytes",
    "durable_log.max_bytes",
    "durable_log.buffer_bytes",
)
_PREFIX = "TOKENBUS_"
_FILE_VARIABLE = "TOKENBUS_SETTINGS"
# The contract's own, and those of FastDeploy's ops.
_OF_FASTDEPLOY = {"TOKENBUS_FASTDEPLOY", "TOKENBUS_FASTDEPLOY_OPS", "TOKENBUS_FASTDEPLOY_FORM"}
_OF_OTHERS = {_FILE_VARIABLE, "TOKENBUS_PURE_PYTHON", *_OF_FASTDEPLOY}
_LARGEST_FILE = 2**20
_NEAR = 0.8  # the prefix that all variables share makes any two of them alike


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be set, by section. What is out of range, or contradicts another, is a SettingsError.

    Example:
        settings = tokenbus.Settings.load(overrides={"client.name": "evaluation", "bus.clients_address": address})
        async with tokenbus.connect(settings=settings) as client:
            tokens = [token async for token in client.generate([1, 2, 3], max_tokens=2)]
    """

    bus: BusSettings = field(default_factory=BusSettings)
    limits: Limits = field(default_factory=Limits.default)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    processor: ProcessorSettings = field(default_factory=ProcessorSettings)
    clients: ClientsSettings = field(default_factory=ClientsSettings)
    client: ClientSettings = field(default_factory=ClientSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    dead_letters: DeadLetterSettings = field(default_factory=DeadLetterSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    durable_log: DurableLogSettings = field(default_factory=DurableLogSettings)
    log: LogSettings = field(default_factory=LogSettings)

    def __post_init__(self) -> None:
        """Refuse sizes that cannot hold one message, or what a worker may send."""
        most = self.limits.max_message_bytes
        for key in _HOLD_A_MESSAGE:
            value = ENTRIES[key].value_in(self)
            if isinstance(value, int) and value < most:
                raise SettingsError(key, f"at least limits.max_message_bytes, {most}", value)
        if self.bus.max_pending_bytes < self.processor.credit_bytes:  # a worker that used its credit would be cut off
            limit = f"at least processor.credit_bytes, {self.processor.credit_bytes}"
            raise SettingsError("bus.max_pending_bytes", limit, self.bus.max_pending_bytes)

    @property
    def most_connections(self) -> int:
        """How many connections a processor takes at once: at least one for each client and worker that it may have."""
        return max(self.bus.max_connections, self.clients.max_clients + self.processor.max_workers)

    @classmethod
    def load(
        cls,
        file: str | Path | None = None,
        environment: Mapping[str, str] = os.environ,
        overrides: Mapping[str, object] | None = None,
    ) -> "Settings":
        """Return the settings from overrides, then variables, then a file, then defaults.

        Variables are TOKENBUS_<SECTION>_<FIELD>; the file, TOML with a table for each section, is the one given, or
        else the one that TOKENBUS_SETTINGS names. Keys of overrides are ``section.field``; a value may be text, which
        is read as a variable's is.
        """
        found = _collect(file, environment, overrides or {})
        try:
            return cls(**{name: maker(**found.section(name)) for name, maker in SECTIONS.items()})
        except SettingsError as error:
            where = found.where.get(error.key, f"{error.key} (a default)")
            raise SettingsError(error.key, error.limit, error.actual, where=where) from None

    def describe(self) -> dict[str, object]:
        """Return every key with its value, for logs and for people."""
        return {key: entry.value_in(self) for key, entry in ENTRIES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One setting."""

    section: str
    name: str
    default: object
    kind: Kind

    @property
    def key(self) -> str:
        """Its name in files and on the command line."""
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return f"TOKENBUS_{self.section}_{self.name}".upper()

    def value_in(self, settings: object) -> object:
        """Return its value in a settings object."""
        return getattr(getattr(settings, self.section), self.name)


def _entries() -> Iterator[Entry]:
    default, schema = Limits.default(), Limits.schema()
    for section, maker in SECTIONS.items():
        for item in fields(maker):
            if maker is Limits:
                kind = limit_kind(item.name, getattr(schema, item.name))
                yield Entry(section, item.name, getattr(default, item.name), kind)
            else:
                yield Entry(section, item.name, item.default, kind_of(item.metadata))


SECTIONS: dict[str, Any] = {section.name: section.type for section in fields(Settings)}
ENTRIES: dict[str, Entry] = {entry.key: entry for entry in _entries()}
"""By key, in the order of the documentation."""
_VARIABLES = {entry.variable: entry for entry in ENTRIES.values()}


@dataclass(frozen=True, slots=True)
class _Found:
    """What was set, and where; each value is of its kind."""

    values: dict[str, object] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)

    def put(self, entry: Entry, value: object, where: str) -> None:
        """Keep a value in the place of one that counts less; refuse one that is not of its kind."""
        refuse(entry.key, entry.kind, value, where)
        self.values[entry.key] = value
        self.where[entry.key] = where

    def section(self, name: str) -> dict[str, object]:
        """Return a section's values, defaults where none was set."""
        own = (entry for entry in ENTRIES.values() if entry.section == name)
        return {entry.name: self.values.get(entry.key, entry.default) for entry in own}


def _collect(file: str | Path | None, environment: Mapping[str, str], overrides: Mapping[str, object]) -> _Found:
    """Return what a file, the environment and overrides set, the last of which wins; all of it is looked at."""
    found = _Found()
    file = file or environment.get(_FILE_VARIABLE)
    if file:
        _from_file(found, Path(file))
    for variable in sorted(name for name in environment if name.startswith(_PREFIX) and name not in _OF_OTHERS):
        entry = _VARIABLES.get(variable)
        if entry is None:
            raise _unknown(variable, variable, _VARIABLES)
        found.put(entry, entry.kind.read(environment[variable]), variable)
    for key, value in overrides.items():
        entry = ENTRIES.get(key)
        if entry is None:
            raise _unknown(key, key, ENTRIES)
        if value is not None:  # an option that was not given
            found.put(entry, entry.kind.read(value) if isinstance(value, str) else value, key)
    return found


def _from_file(found: _Found, path: Path) -> None:
    name = shown(str(path))[1:-1]
    for section, values in _tables(path, name).items():
        if section not in SECTIONS:
            raise _unknown(section, f"{name}: {shown(section)[1:-1]}", SECTIONS)
        if not isinstance(values, dict):
            raise SettingsError(section, "a table of settings", values, where=f"{name}: {section}")
        for field_name, value in values.items():
            key = f"{section}.{field_name}"
            entry = ENTRIES.get(key)
            if entry is None:
                raise _unknown(key, f"{name}: {shown(key)[1:-1]}", ENTRIES)
            found.put(entry, value, f"{name}: {key}")


def _tables(path: Path, name: str) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
    except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise SettingsError(name, f"a settings file that can be read: {reason}", Shown(""), where=name) from None
    if len(data) > _LARGEST_FILE:
        raise SettingsError(name, f"a settings file of at most {_LARGEST_FILE} bytes", Shown("a larger one"))
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise SettingsError(name, "a settings file in TOML", str(error)) from None


def _unknown(key: str, where: str, known: Iterable[str]) -> SettingsError:
    near = difflib.get_close_matches(key, known, n=1, cutoff=_NEAR)
    hint = f"; did you mean {near[0]}?" if near else ""
    return SettingsError(key, f"no such setting{hint}", Shown(""), where=where)
