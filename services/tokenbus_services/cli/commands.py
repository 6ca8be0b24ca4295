"""Commands of `tokenbus` that are brought by entry points, as `tokenbus fastdeploy` is by the engines."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from tokenbus_services.cli.arguments import Parser
from tokenbus_services.cli.errors import CommandError
from tokenbus_services.plugins import PluginError, load, names

COMMANDS = "tokenbus.commands"
"""The entry-point group; each names a `CommandKind`. A command of this package goes before one of the same name."""


@dataclass(frozen=True, slots=True)
class CommandKind:
    """A command: the line that says what it is for, its options, and what it does."""

    summary: str
    declare: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]


def brought() -> dict[str, str]:
    """Return the summaries of the commands that installed distributions bring; of a broken one, what is wrong."""
    return {name: _summary(name) for name in names(COMMANDS)}


def command(name: str) -> CommandKind | None:
    """Return a command by its name, None if none is brought; a CommandError of one line says why it cannot be used."""
    if name not in names(COMMANDS):
        return None
    try:
        return load(COMMANDS, name, CommandKind)
    except PluginError as error:
        raise CommandError(str(error)) from None


def _summary(name: str) -> str:
    try:
        return load(COMMANDS, name, CommandKind).summary
    except PluginError as error:
        return f"({error})"
