"""Settings for tests: values by key, for constants of the sections too."""

import json
from collections.abc import Mapping, MutableMapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tokenbus.settings import ENTRIES, SECTIONS, Settings
from tokenbus_contracts import Limits

_CONSTANTS = "CONSTANTS_OF_TESTS"


def settings_of(values: Mapping[str, object]) -> Settings:
    given: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for key, value in values.items():
        section, _, name = key.partition(".")
        given[section][name] = value
    limits = replace(Limits.default(), **given.pop("limits"))
    limits = replace(limits, max_draft_tokens_per_row=limits.max_tokens_per_row)
    return Settings(**{name: SECTIONS[name](**arguments) for name, arguments in given.items()}, limits=limits)


def publishing_in(folder: Path | str, usual: Mapping[str, object], overrides: Mapping[str, object]) -> Settings:
    """Return settings of an engine that publishes over addresses in a folder, from a thread, and leaves at once.

    Overrides have a double underscore for a key's dot.
    """
    shared = {
        "bus.workers_address": f"ipc://{folder}/w", "bus.clients_address": f"ipc://{folder}/c", "bus.linger_ms": 20,
        "bus.reconnect_ms": 10, "bus.reconnect_max_ms": 50, "worker.publisher": "thread", "worker.max_requests": 0,
        "worker.drain_timeout_ms": 0, "processor.drain_timeout_ms": 0, "client.drain_timeout_ms": 0,
    }  # fmt: skip
    return settings_of({**shared, **usual, **{name.replace("__", "."): value for name, value in overrides.items()}})


def environment_of(values: Mapping[str, object]) -> dict[str, str]:
    """Return the variables of a process with these values; only a process of the tests' fork server takes constants."""
    variables = {ENTRIES[key].variable: str(value) for key, value in values.items() if key in ENTRIES}
    constants = {key: value for key, value in values.items() if key not in ENTRIES}
    return variables | ({_CONSTANTS: json.dumps(constants)} if constants else {})


def take_constants(environment: MutableMapping[str, str]) -> None:
    """Give the sections' constants, in this process, the values that `environment_of` wrote."""
    for key, value in json.loads(environment.pop(_CONSTANTS, "{}")).items():
        section, _, name = key.partition(".")
        names = [item.name for item in fields(SECTIONS[section])]
        make: Any = SECTIONS[section].__init__
        defaults = list(make.__defaults__)
        defaults[names.index(name)] = value
        make.__defaults__ = tuple(defaults)
