"""Commands of `tokenbus` that entry points add, as the engines add `tokenbus fastdeploy`."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from tokenbus_services.cli.arguments import Parser
from tokenbus_services.cli.errors import CommandError
from tokenbus_services.plugins import PluginError, load, names

COMMANDS = "tokenbus.commands"
"""The entry-point group; each entry is a `CommandKind`. It cannot replace a command of this package."""


@dataclass(frozen=True, slots=True)
class CommandKind:
    """A command: the line that says what it is for, its options, and what it does."""

    summary: str
    declare: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]


def brought() -> dict[str, str]:
    """Return the added commands and their summaries; for one that cannot be loaded, the error."""
    return {name: _summary(name) for name in names(COMMANDS)}


def command(name: str) -> CommandKind | None:
    """Return an added command, or None if there is none of that name; raises CommandError if it cannot be loaded."""
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
