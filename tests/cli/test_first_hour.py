"""docs/first-hour.md: the commands in it are ones that can be given."""

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from tokenbus.cli.arguments import Parser

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "first-hour.md").read_text()
COMMANDS = re.findall(r"^\$ (tokenbus .*)$", PAGE, re.MULTILINE)


def test_page_has_each_of_the_commands() -> None:
    assert {"up", "tap", "record", "inspect"} <= {shlex.split(line)[1] for line in COMMANDS}
    assert "python -m benchmarks --quick" in PAGE
    assert "$ make demo\n" in PAGE
    assert "\ndemo: $(RUNTIME)" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("line", COMMANDS)
def test_command_is_understood(line: str) -> None:
    _, command, *rest = shlex.split(line)
    parser = Parser(prog=command)
    importlib.import_module(f"tokenbus.cli.{command}").declare(parser)
    assert isinstance(parser.options(rest), argparse.Namespace)


def test_quoted_lines_are_what_is_said() -> None:
    """What the page says that a command answers is in the code that answers it."""
    folder = ROOT / "services" / "tokenbus" / "cli"
    code = "\n".join(path.read_text() for path in folder.rglob("*.py"))
    for words in ("no gateway: ", "before it was ready", "something was WRONG"):
        assert words in PAGE
        assert words in code
