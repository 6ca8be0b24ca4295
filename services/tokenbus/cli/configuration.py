"""The options by which every service of the command line takes its settings."""

import argparse
from collections.abc import Mapping

from tokenbus.logs import configure
from tokenbus.settings import ENTRIES, Settings

_OF_ALL = {"--log-level": "log.level", "--log-format": "log.format"}

EPILOG = """\
Settings come from options, else from variables such as TOKENBUS_WORKER_ID, else from the file, else from their
defaults. docs/settings.md lists them all; an unknown key or a value out of its range ends it with one line, status 2.
"""


def declare_settings(parser: argparse.ArgumentParser, direct: Mapping[str, str]) -> None:
    """Declare --settings and --set, and an option of its own for each setting that this command's users need."""
    parser.epilog = EPILOG
    group = parser.add_argument_group("settings")
    group.add_argument("--settings", metavar="FILE", help="a TOML file (default: what TOKENBUS_SETTINGS names)")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        type=_pair,
        metavar="KEY=VALUE",
        help="any setting, as in --set processor.max_workers=8; may be repeated",
    )
    for flag, key in {**direct, **_OF_ALL}.items():
        entry = ENTRIES[key]
        default = entry.default if entry.default != "" else "empty"
        meaning = f"{key}: {entry.meaning} (default: {default})".replace("%", "%%")
        group.add_argument(flag, dest=key, metavar=entry.name.upper(), help=meaning)


def load_settings(options: argparse.Namespace) -> Settings:
    """Return the settings that the options, the environment and the file come to, and begin to log as they say."""
    direct = {key: value for key, value in vars(options).items() if key in ENTRIES and value is not None}
    settings = Settings.load(options.settings, overrides=dict(options.set) | direct)
    configure(settings.log)
    return settings


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"KEY=VALUE, got {text!r}")
    return key, value
