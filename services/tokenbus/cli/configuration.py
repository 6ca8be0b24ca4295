"""The command-line options that set a service's settings."""

import argparse
from collections.abc import Mapping

from tokenbus.logs import configure
from tokenbus.settings import ENTRIES, Settings

_OF_ALL = {"--log-level": "log.level", "--log-format": "log.format"}

EPILOG = """\
An option overrides an environment variable such as TOKENBUS_WORKER_ID, which overrides the settings file. An unknown
setting, or a value out of range, is an error (status 2).
"""


def declare_settings(parser: argparse.ArgumentParser, direct: Mapping[str, str]) -> None:
    """Declare --settings, --set, and an option for each setting in `direct`, which maps flags to keys."""
    parser.epilog = EPILOG
    group = parser.add_argument_group("settings")
    group.add_argument("--settings", metavar="FILE", help="a TOML file of settings (default: $TOKENBUS_SETTINGS)")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        type=_pair,
        metavar="KEY=VALUE",
        help="override any setting, as in --set processor.max_workers=8; may be repeated",
    )
    for flag, key in {**direct, **_OF_ALL}.items():
        entry = ENTRIES[key]
        default = entry.default if entry.default != "" else "empty"
        meaning = f"{key}: {entry.meaning} (default: {default})".replace("%", "%%")
        group.add_argument(flag, dest=key, metavar=entry.name.upper(), help=meaning)


def load_settings(options: argparse.Namespace) -> Settings:
    """Load the settings from the options, the environment and the settings file, and configure logging."""
    direct = {key: value for key, value in vars(options).items() if key in ENTRIES and value is not None}
    settings = Settings.load(options.settings, overrides=dict(options.set) | direct)
    configure(settings.log)
    return settings


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"KEY=VALUE, got {text!r}")
    return key, value
