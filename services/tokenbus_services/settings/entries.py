"""Every setting there is, by key: read from the sections' fields and the contract's limits."""

from dataclasses import dataclass, fields

from tokenbus_contracts import Limits
from tokenbus_services.settings.gateway import GatewaySettings
from tokenbus_services.settings.kinds import Kind, kind_of
from tokenbus_services.settings.sections import (
    BusSettings,
    ClientSettings,
    ClientsSettings,
    DeadLetterSettings,
    LogSettings,
    MetricsSettings,
    ProcessorSettings,
    WorkerSettings,
    limit_kind,
)

SECTIONS: dict[str, type] = {
    "bus": BusSettings,
    "limits": Limits,
    "worker": WorkerSettings,
    "processor": ProcessorSettings,
    "clients": ClientsSettings,
    "client": ClientSettings,
    "gateway": GatewaySettings,
    "dead_letters": DeadLetterSettings,
    "metrics": MetricsSettings,
    "log": LogSettings,
}


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


def _entries() -> list[Entry]:
    default, schema = Limits.default(), Limits.schema()
    found = []
    for section, maker in SECTIONS.items():
        for item in fields(maker):
            if maker is Limits:
                most = getattr(schema, item.name)
                found.append(Entry(section, item.name, getattr(default, item.name), limit_kind(item.name, most)))
            else:
                found.append(Entry(section, item.name, item.default, kind_of(item.metadata)))
    return found


ENTRIES: dict[str, Entry] = {entry.key: entry for entry in _entries()}
"""By key, in the order of the documentation."""
