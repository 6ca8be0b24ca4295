"""Settings: a frozen object, loaded from overrides, environment variables, a file and defaults."""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from tokenbus.backports import tomllib
from tokenbus.settings.errors import SettingsError as SettingsError
from tokenbus.settings.errors import Shown, shown
from tokenbus.settings.kinds import Entry as Entry
from tokenbus.settings.kinds import entries_of
from tokenbus.settings.kinds import listed_addresses as listed_addresses
from tokenbus.settings.sections import LIMITS
from tokenbus.settings.sections import BusSettings as BusSettings
from tokenbus.settings.sections import ClientSettings as ClientSettings
from tokenbus.settings.sections import ClientsSettings as ClientsSettings
from tokenbus.settings.sections import DurableLogSettings as DurableLogSettings
from tokenbus.settings.sections import GatewaySettings as GatewaySettings
from tokenbus.settings.sections import LogSettings as LogSettings
from tokenbus.settings.sections import ProcessorSettings as ProcessorSettings
from tokenbus.settings.sections import WorkerSettings as WorkerSettings
from tokenbus_contracts import Limits

_HOLD_A_MESSAGE = ("worker.retention_bytes", "clients.buffer_bytes", "durable_log.max_bytes")
_T = TypeVar("_T")
_PREFIX = "TOKENBUS_"
_FILE_VARIABLE = "TOKENBUS_SETTINGS"
_FASTDEPLOY_VARIABLES = {"TOKENBUS_FASTDEPLOY", "TOKENBUS_FASTDEPLOY_OPS", "TOKENBUS_FASTDEPLOY_FORM"}
_OTHER_VARIABLES = {_FILE_VARIABLE, "TOKENBUS_CACHE_DIR", "TOKENBUS_PURE_PYTHON", *_FASTDEPLOY_VARIABLES}
_LARGEST_FILE = 2**20
_SIMILARITY = 0.8  # minimum for suggesting a name; high, because all variables share a prefix


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings by section. A value that is out of range or contradicts another value raises a SettingsError.

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
    durable_log: DurableLogSettings = field(default_factory=DurableLogSettings)
    log: LogSettings = field(default_factory=LogSettings)

    def __post_init__(self) -> None:
        """Raise a SettingsError if a buffer's size is too small for the largest message."""
        most = self.limits.max_message_bytes
        for key in _HOLD_A_MESSAGE:
            value = ENTRIES[key].value_in(self)
            if isinstance(value, int) and value < most:
                raise SettingsError(key, f"at least {most}, the largest message", value)

    @property
    def most_connections(self) -> int:
        """The limit of a processor's connections, which is enough for all clients and workers."""
        return max(self.bus.max_connections, self.clients.max_clients + self.processor.max_workers)

    @classmethod
    def load(
        cls,
        file: str | Path | None = None,
        environment: Mapping[str, str] = os.environ,
        overrides: Mapping[str, object] | None = None,
    ) -> "Settings":
        """Load the settings.

        Overrides take precedence over environment variables, which take precedence over the file and then the defaults.

        Variables are named TOKENBUS_<SECTION>_<FIELD>. The file is TOML with a table for each section. By default, the
        variable TOKENBUS_SETTINGS names the file. Keys of overrides have the form ``section.field``. Overrides
        may be texts, as in environment variables.
        """
        found = _collect(file, environment, overrides or {})
        sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
        for key, (value, _) in found.items():
            sections[ENTRIES[key].section][ENTRIES[key].name] = value
        try:
            made = {name: maker(**sections[name]) for name, maker in SECTIONS.items() if maker is not Limits}
            limits = replace(Limits.default(), **sections["limits"])
            return cls(**made, limits=replace(limits, max_draft_tokens_per_row=limits.max_tokens_per_row))
        except SettingsError as error:
            where = found[error.key][1] if error.key in found else f"{error.key} (a default)"
            raise SettingsError(error.key, error.limit, error.actual, where=where) from None

    def describe(self) -> dict[str, object]:
        """Return the values of all settings by key."""
        return {key: entry.value_in(self) for key, entry in ENTRIES.items()}


SECTIONS: dict[str, Any] = {section.name: section.type for section in fields(Settings)}
ENTRIES: dict[str, Entry] = {
    entry.key: entry
    for section in SECTIONS.values()
    for entry in (LIMITS if section is Limits else entries_of(section))
}
"""All settings by key, in the order of the documentation."""
_VARIABLES = {entry.variable: entry for entry in ENTRIES.values()}
_FIXED = {
    name
    for section, maker in SECTIONS.items()
    for item in vars(maker)
    if not item.startswith("_")
    for name in (f"{section}.{item}", f"{_PREFIX}{section}_{item}".upper())
}
"""The keys and environment variables of constants, which users cannot set."""
_Found = dict[str, tuple[object, str]]
"""The valid values by key, each with its source."""


def _collect(file: str | Path | None, environment: Mapping[str, str], overrides: Mapping[str, object]) -> _Found:
    """Check and merge the values of the file, the environment and the overrides, in increasing precedence."""
    found: _Found = {}
    file = file or environment.get(_FILE_VARIABLE)
    if file:
        found.update(_from_file(Path(file)))
    for variable in sorted(name for name in environment if name.startswith(_PREFIX) and name not in _OTHER_VARIABLES):
        entry = _known(variable, variable, _VARIABLES)
        found[entry.key] = entry.convert(environment[variable], variable, is_text=True), variable
    for key, value in overrides.items():
        entry = _known(key, key, ENTRIES)
        if value is not None:  # a missing command-line option is None
            found[key] = entry.convert(value, is_text=isinstance(value, str)), key
    return found


def _from_file(path: Path) -> _Found:
    found: _Found = {}
    name = shown(str(path))[1:-1]
    for section, values in _tables(path, name).items():
        _known(section, f"{name}: {shown(section)[1:-1]}", SECTIONS)
        if not isinstance(values, dict):
            raise SettingsError(section, "a table of settings", values, where=f"{name}: {section}")
        for field_name, value in values.items():
            key = f"{section}.{field_name}"
            where = f"{name}: {shown(key)[1:-1]}"
            found[key] = _known(key, where, ENTRIES).convert(value, where), where
    return found


def _known(key: str, where: str, known: Mapping[str, _T]) -> _T:
    """Return the entry of a key. For an unknown key, raises a SettingsError with a similar key."""
    if key in known:
        return known[key]
    if key in _FIXED:
        raise SettingsError(key, "a constant of the code, which cannot be set", Shown(""), where=where)
    similar = difflib.get_close_matches(key, known, n=1, cutoff=_SIMILARITY)
    hint = f"; did you mean {similar[0]}?" if similar else ""
    raise SettingsError(key, f"no such setting{hint}", Shown(""), where=where)


def _tables(path: Path, name: str) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise SettingsError(name, f"a settings file that is readable: {reason}", Shown(""), where=name) from None
    if len(data) > _LARGEST_FILE:
        raise SettingsError(name, f"a settings file of at most {_LARGEST_FILE} bytes", Shown("a larger one"))
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise SettingsError(name, "a settings file in TOML", str(error)) from None
