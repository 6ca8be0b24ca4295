"""tokenbus fastdeploy: FastDeploy's own command, with the ops replaced in every process that it starts."""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from tokenbus_engines.fastdeploy_switch import SWITCH, chosen
from tokenbus_services.cli.arguments import Parser
from tokenbus_services.cli.commands import CommandKind
from tokenbus_services.cli.errors import WRONG_USE, CommandError

FORM = "TOKENBUS_FASTDEPLOY_FORM"
_DESCRIPTION = """\
Run FastDeploy's own command with Tokenbus in the place of its System V queue. Nothing of FastDeploy is edited: its save
and get ops are replaced in each process as FastDeploy loads them, in those that it starts as well, and after an
upgrade, too. What follows `--` is run in the place of this process: its signals and its exit status are the command's
own.

Before, FastDeploy's files are looked at with the command's own Python. Where FastDeploy or its ops are not there, or
where that Python would not replace them, nothing is started, and one line says why.

The status is the command's; 1 if nothing was started, 2 if this command line or a setting is wrong, 126 if the command
cannot be run, 127 if there is none.

examples:
  tokenbus fastdeploy -- python -m fastdeploy.entrypoints.openai.api_server --model models/ernie
  tokenbus fastdeploy -- fastdeploy serve --model models/ernie
  TOKENBUS_FASTDEPLOY=off tokenbus fastdeploy -- ...          back to FastDeploy's own ops

TOKENBUS_FASTDEPLOY=on does the same for a command that is started without `tokenbus fastdeploy`, where Tokenbus is
installed in the environment of FastDeploy.
"""
_BY_ZEROMQ = "FD_USE_GET_SAVE_OUTPUT_V1"
"""FastDeploy's switch for another way from its worker to its token processor, on which no op is called."""
_SWITCH_PATH = Path(__file__).with_name("path")
_CANNOT_RUN, _NOT_FOUND = 126, 127
_MOST_SECONDS = 60
_ANSWER = "tokenbus switch: "
_PROBE = f"""\
import sys
switch = sys.modules.get("tokenbus_engines.fastdeploy_switch")
print({_ANSWER!r} + (switch.state() if switch else "off"))
"""
_FLAGS = re.compile("-[EIPsS]+")
"""Python's own options that say which files it reads as it starts."""


def declare(parser: Parser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.usage = "tokenbus fastdeploy [-h] [--form NAME] -- COMMAND..."
    parser.add_argument(
        "--form", metavar="NAME", help=f"which release's ops to be, as {FORM} (that of the installed FastDeploy)"
    )
    parser.keeps_rest = True


def run(options: argparse.Namespace) -> int:
    """Become the command; a CommandError says in one line why that cannot be."""
    command: list[str] = options.rest
    if not command:
        raise CommandError("fastdeploy: a command behind --, as `tokenbus fastdeploy -- python -m ...`", WRONG_USE)
    program = shutil.which(command[0])
    if program is None:
        raise CommandError(f"{command[0]}: command not found", _NOT_FOUND)
    if options.form is not None:
        _check_form(options.form)
    environment = os.environ | ({FORM: options.form} if options.form else {})
    is_on, fault = chosen(environment.setdefault(SWITCH, "on"))
    if fault:
        raise CommandError(fault, WRONG_USE)
    if is_on:
        environment = _switched(program, command, environment)
    else:
        sys.stderr.write(f"tokenbus: {SWITCH}=off: FastDeploy's own ops stay\n")
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(program, command, environment)  # noqa: S606 - the user's own command
    except OSError as error:
        raise CommandError(f"{command[0]}: {(error.strerror or str(error)).lower()}", _CANNOT_RUN) from None


def _check_form(name: str) -> None:
    from tokenbus_engines.fastdeploy.forms import FORMS  # noqa: PLC0415 - it imports the ops, and they take a second

    if name not in FORMS:
        raise CommandError(f"--form: one of {', '.join(FORMS)}, got {name!r}", WRONG_USE)


def _switched(program: str, command: Sequence[str], environment: dict[str, str]) -> dict[str, str]:
    """Return the environment in which the command's Python replaces the ops."""
    if environment.get(_BY_ZEROMQ, "0") != "0":
        got = environment[_BY_ZEROMQ]
        raise CommandError(f"{_BY_ZEROMQ}: 0, as FastDeploy calls no op otherwise, got {got}", WRONG_USE)
    python = _python_of(program)
    by_path = [str(_SWITCH_PATH), *filter(None, [environment.get("PYTHONPATH")])]
    for tried in (environment, environment | {"PYTHONPATH": os.pathsep.join(by_path)}):
        found = _probe([python, *_flags(python == program, command)], tried)
        if found == "on":
            return tried
        if found != "off":
            raise CommandError(found)
    raise CommandError(
        f"{python}: a Python that reads tokenbus_fastdeploy.pth or PYTHONPATH as it starts, got one that does neither: "
        "is Tokenbus installed for it?"
    )


def _probe(python: list[str], environment: Mapping[str, str]) -> str:
    """Return whether a Python has the switch on as it starts, or what FastDeploy lacks there."""
    try:
        run = subprocess.run(  # noqa: S603 - the user's own Python
            [*python, "-c", _PROBE],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_MOST_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandError(f"{python[0]}: {error}") from None
    for line in run.stdout.splitlines():
        if line.startswith(_ANSWER):
            return line.removeprefix(_ANSWER)
    last = (run.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    raise CommandError(f"{python[0]}: status {run.returncode} where it was asked for FastDeploy: {last}")


def _python_of(program: str) -> str:
    """Return the Python that runs a program: itself, that of its first line, or this one, as for a shell script."""
    if _is_python(program):
        return program
    with open(program, "rb") as file:  # noqa: PTH123 - what `which` found
        first = file.readline(4096)
    words = first.removeprefix(b"#!").decode(errors="replace").split() if first.startswith(b"#!") else []
    named = words[-1] if words and Path(words[0]).name == "env" else "".join(words[:1])
    found = shutil.which(named) if _is_python(named) else None
    return found or sys.executable


def _is_python(path: str) -> bool:
    return bool(re.fullmatch(r"(python|pypy)[0-9.]*", Path(path).name))


def _flags(is_python: bool, command: Sequence[str]) -> list[str]:  # noqa: FBT001
    """Return with which options to ask the Python, so that it has the path that the command will have."""
    if not is_python:
        return ["-P"]
    options = list(takewhile(lambda word: word.startswith("-") and word not in {"-m", "-c"}, command[1:]))
    flags = [word for word in options if _FLAGS.fullmatch(word)]
    rest = command[1 + len(options) :]
    return flags if rest[:1] in (["-m"], ["-c"]) else [*flags, "-P"]


COMMAND = CommandKind("run FastDeploy with Tokenbus in the place of its queue", declare, run)
