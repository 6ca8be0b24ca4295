"""The settings of a deployment as one frozen object, and the rules that hold between its sections."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tokenbus_contracts import Limits
from tokenbus_services.settings.entries import ENTRIES, SECTIONS
from tokenbus_services.settings.errors import SettingsError
from tokenbus_services.settings.gateway import GatewaySettings
from tokenbus_services.settings.sections import (
    BusSettings,
    ClientSettings,
    ClientsSettings,
    ProcessorSettings,
    WorkerSettings,
)
from tokenbus_services.settings.sources import collect
from tokenbus_services.settings.watching import DeadLetterSettings, LogSettings, MetricsSettings

_HOLD_A_MESSAGE = ("bus.max_part_bytes", "worker.retention_bytes", "processor.credit_bytes", "clients.send_queue_bytes")


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

    @classmethod
    def load(
        cls,
        file: str | Path | None = None,
        environment: Mapping[str, str] = os.environ,
        overrides: Mapping[str, object] | None = None,
    ) -> Self:
        """Return the settings from overrides, then variables, then a file, then defaults.

        Variables are TOKENBUS_<SECTION>_<FIELD>; the file, TOML with a table for each section, is the one given, or
        else the one that TOKENBUS_SETTINGS names. Keys of overrides are ``section.field``; a value may be text, which
        is read as a variable's is.
        """
        found = collect(file, environment, overrides or {})
        try:
            return cls(**{name: maker(**found.section(name)) for name, maker in SECTIONS.items()})
        except SettingsError as error:
            where = found.where.get(error.key, f"{error.key} (a default)")
            raise SettingsError(error.key, error.limit, error.actual, where=where) from None

    def describe(self) -> dict[str, object]:
        """Return every key with its value, for logs and for people."""
        return {key: entry.value_in(self) for key, entry in ENTRIES.items()}
