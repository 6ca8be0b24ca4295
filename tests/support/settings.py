"""Settings for tests: values by key, for constants of the sections too."""

from collections.abc import Mapping
from dataclasses import replace

from tokenbus_services.settings import ENTRIES, Settings


def settings_of(values: Mapping[str, object]) -> Settings:
    """Return settings from these values and defaults; a section takes its constants by its constructor."""
    settings = Settings.load(environment={}, overrides={key: values[key] for key in values if key in ENTRIES})
    for key in values.keys() - ENTRIES.keys():
        section, _, name = key.partition(".")
        settings = replace(settings, **{section: replace(getattr(settings, section), **{name: values[key]})})
    return settings
