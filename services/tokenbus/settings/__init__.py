"""Settings: one frozen object, from overrides, then the environment, then a file, then defaults."""

from tokenbus.settings.errors import SettingsError
from tokenbus.settings.kinds import Entry, listed_addresses
from tokenbus.settings.sections import (
    BusSettings,
    ClientSettings,
    ClientsSettings,
    DurableLogSettings,
    GatewaySettings,
    LogSettings,
    ProcessorSettings,
    WorkerSettings,
)
from tokenbus.settings.settings import ENTRIES, SECTIONS, Settings

__all__ = [
    "ENTRIES",
    "SECTIONS",
    "BusSettings",
    "ClientSettings",
    "ClientsSettings",
    "DurableLogSettings",
    "Entry",
    "GatewaySettings",
    "LogSettings",
    "ProcessorSettings",
    "Settings",
    "SettingsError",
    "WorkerSettings",
    "listed_addresses",
]
