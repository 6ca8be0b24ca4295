"""Commands of `tokenbus` that entry points add, as the engines add `tokenbus fastdeploy`."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenbus.cli.arguments import Parser
from tokenbus.plugins import PluginError, load, names

COMMANDS = "tokenbus.commands"
"""The entry-point group; each entry is a `CommandKind`. It cannot replace a command of this package."""


@dataclass(frozen=True, slots=True)
class CommandKind:
    """A command: the line that says what it is for, its options, and what it does."""

    summary: str
    declare: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]


def summaries(group: str, kind: type[Any]) -> dict[str, str]:
    """Return the plugins of a group and their summaries; for one that cannot be loaded, the error."""
    return {name: _summary(group, name, kind) for name in names(group)}


def _summary(group: str, name: str, kind: type[Any]) -> str:
    try:
        return str(load(group, name, kind).summary)
    except PluginError as error:
        return f"({error})"
