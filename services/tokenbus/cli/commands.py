"""Commands that entry points add to `tokenbus`, for example `tokenbus fastdeploy`."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenbus.cli.arguments import Parser
from tokenbus.plugins import PluginError, load, names

COMMANDS = "tokenbus.commands"
"""The entry-point group; each entry is a `CommandKind`. An entry cannot replace a built-in command."""


@dataclass(frozen=True, slots=True)
class CommandKind:
    """A command: its one-line summary, a function that declares its options, and a function that runs it."""

    summary: str
    declare: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]


def summaries(group: str, kind: type[Any]) -> dict[str, str]:
    """Return the summary of each plugin of a group; for a plugin that cannot be loaded, the error."""
    return {name: _summary(group, name, kind) for name in names(group)}


def _summary(group: str, name: str, kind: type[Any]) -> str:
    try:
        return str(load(group, name, kind).summary)
    except PluginError as error:
        return f"({error})"
