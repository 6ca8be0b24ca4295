"""The command `tokenbus fastdeploy`."""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenbus.cli.arguments import Parser
from tokenbus.cli.errors import WRONG_USE, CommandError
from tokenbus.engines.fastdeploy_switch import FORM, SWITCH, read_switch
from tokenbus.printable import reason_of

_DESCRIPTION = """\
Run a FastDeploy command with Tokenbus in place of FastDeploy's System V queue. No file of FastDeploy is edited: each
process, including those that FastDeploy starts, replaces the save and get ops when it loads them. This still works
after an upgrade of FastDeploy. The command after `--` takes the place of this process, so signals reach it and its exit
status is returned.

First the command's Python looks for FastDeploy. If FastDeploy or its ops are missing, or if that Python would not
replace them, nothing is started, and one line says why.

Exit status: the command's; 1 if nothing was started, 2 if this command line or a setting is invalid, 126 if the
command cannot be run, 127 if it is not found.

examples:
  tokenbus fastdeploy -- python -m fastdeploy.entrypoints.openai.api_server --model models/ernie
  tokenbus fastdeploy -- fastdeploy serve --model models/ernie
  TOKENBUS_FASTDEPLOY=off tokenbus fastdeploy -- ...          back to FastDeploy's own ops

If Tokenbus is installed in FastDeploy's environment, TOKENBUS_FASTDEPLOY=on does the same without this command.
"""
_BY_ZEROMQ = "FD_USE_GET_SAVE_OUTPUT_V1"
"""FastDeploy's setting for ZeroMQ instead of the queue. If it is on, FastDeploy calls no save or get ops."""
_SWITCH_PATH = Path(__file__).with_name("path")
_CANNOT_RUN, _NOT_FOUND = 126, 127
_MOST_SECONDS = 60
_ANSWER = "tokenbus switch: "
_PROBE = f"""\
import sys
if sys.path[:1] == [""] and sys.argv[1:]:
    sys.path[0] = sys.argv[1]
switch = sys.modules.get("tokenbus.engines.fastdeploy_switch")
print({_ANSWER!r} + (switch.state() if switch else "off"))
"""
_VARIABLES = (FORM, "INFERENCE_MSG_QUEUE_ID", "INFERENCE_MSG_ID")


class _Start(NamedTuple):
    python: str
    options: list[str]
    """Python's own options, some of which change the files that Python reads at its start."""
    script: str | None
    """Path of the script, or None if the command runs a module, code from the command line, or an unknown program."""


def declare(parser: Parser) -> None:
    parser.description = _DESCRIPTION
    parser.usage = "tokenbus fastdeploy [-h] [--form NAME] -- COMMAND..."
    parser.add_argument(
        "--form", metavar="NAME", help=f"the form of the ops, as {FORM} (default: the installed release's)"
    )
    parser.keeps_rest = True


def run(options: argparse.Namespace) -> int:
    """Replace this process by the command, or raise CommandError with the reason."""
    command: list[str] = options.rest
    if not command:
        raise CommandError("fastdeploy: expected a command after --: `tokenbus fastdeploy -- python -m ...`", WRONG_USE)
    program = shutil.which(command[0])
    if program is None and "/" in command[0] and os.path.exists(command[0]):  # noqa: PTH110 - as `which` takes it
        raise CommandError(f"{command[0]}: permission denied", _CANNOT_RUN)
    if program is None:
        raise CommandError(f"{command[0]}: command not found", _NOT_FOUND)
    environment = os.environ | ({FORM: options.form} if options.form else {})
    is_on, fault = read_switch(environment.setdefault(SWITCH, "on"))
    if fault:
        raise CommandError(fault, WRONG_USE)
    if options.form is not None:
        _check_form("--form", options.form)
    if is_on:
        _check_variables(environment)
        environment = _switched(program, command, environment)
    else:
        sys.stderr.write(f"tokenbus: {SWITCH}=off: FastDeploy's own ops stay\n")
    sys.stdout.flush()
    sys.stderr.flush()
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # otherwise, the command would also ignore these signals
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execve(program, command, environment)  # noqa: S606 - the user's own command
    except OSError as error:
        raise CommandError(f"{command[0]}: {reason_of(error)}", _CANNOT_RUN) from None


def _check_form(where: str, name: str) -> None:
    from tokenbus.engines.fastdeploy.forms import FORMS  # noqa: PLC0415 - importing the ops takes a second

    if name not in FORMS:
        raise CommandError(f"{where}: one of {', '.join(FORMS)}, got {name!r}", WRONG_USE)


def _check_variables(environment: Mapping[str, str]) -> None:
    """Refuse values that would make every process of the engine fail."""
    if not any(name in environment for name in _VARIABLES):
        return
    from tokenbus.engines.fastdeploy.environment import message_id, queue_id  # noqa: PLC0415 - as above
    from tokenbus.settings import SettingsError  # noqa: PLC0415 - as above

    if name := environment.get(FORM, "").strip():
        _check_form(FORM, name)
    try:
        queue_id(environment)
        message_id(environment)
    except SettingsError as error:
        raise CommandError(str(error), WRONG_USE) from None


def _switched(program: str, command: Sequence[str], environment: dict[str, str]) -> dict[str, str]:
    """Return the environment in which the command's Python replaces the ops."""
    if environment.get(_BY_ZEROMQ, "0") != "0":
        got = environment[_BY_ZEROMQ]
        raise CommandError(f"{_BY_ZEROMQ}: 0, as FastDeploy calls no op otherwise, got {got}", WRONG_USE)
    start = _start_of(program, command[1:])
    by_path = [str(_SWITCH_PATH), *filter(None, [environment.get("PYTHONPATH")])]
    for tried in (environment, environment | {"PYTHONPATH": os.pathsep.join(by_path)}):
        found = _probe(start, tried)
        if found == "on":
            return tried
        if found != "off":
            raise CommandError(found)
    raise CommandError(
        f"{start.python}: this Python must read tokenbus_fastdeploy.pth or PYTHONPATH as it starts, "
        "but it reads neither: is Tokenbus installed for it?"
    )


def _probe(start: _Start, environment: Mapping[str, str]) -> str:
    """Start the command's Python, and return its report: `on`, `off`, or an error."""
    script, folder = start.script, []
    if script is not None:  # Python's first path is the script's folder, or the script itself if it is a folder
        folder = [script if os.path.isdir(script) else os.path.dirname(os.path.realpath(script))]  # noqa: PTH112, PTH120
    try:
        run = subprocess.run(  # noqa: S603 - the user's own Python
            [start.python, *start.options, "-c", _PROBE, *folder],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_MOST_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandError(f"{start.python}: {error}") from None
    for line in run.stdout.splitlines():
        if line.startswith(_ANSWER):
            return line.removeprefix(_ANSWER)
    last = (run.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    raise CommandError(f"{start.python}: status {run.returncode} where it was asked for FastDeploy: {last}")


def _start_of(program: str, arguments: Sequence[str]) -> _Start:
    """Return how a program starts Python. An unknown program, such as `bash`, is assumed to start this Python."""
    if _is_python(program):
        return _Start(program, *_parsed(arguments))
    words = _first_line(program)
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if word != "-S"]
    found = shutil.which(words[0]) if words and _is_python(words[0]) else None
    return _Start(found, _parsed(words[1:])[0], program) if found else _Start(sys.executable, [], None)


def _first_line(program: str) -> list[str]:
    """Return the words after `#!` in a script's first line, or an empty list for any other file."""
    try:
        with open(program, "rb") as file:  # noqa: PTH123 - what `which` found
            first = file.readline(4096)
    except OSError:  # an executable file may be unreadable
        return []
    return first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []


def _is_python(path: str) -> bool:
    return bool(re.fullmatch(r"(python|pypy)[0-9.]*", Path(path).name))


def _parsed(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Split Python's arguments: return Python's own options, and the script or None if there is no script."""
    options: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "-" or not word.startswith("-"):
            return options, None if word == "-" else word
        flags = (re.match("-[^-WXcm]*", word) or [""])[0]
        ends = word[len(flags) :][:1]
        if len(flags) > 1 and not set(flags) & set("Vh?"):
            options.append(flags)
        if ends in {"c", "m"}:
            return options, None
        if ends in {"W", "X"}:
            options += [f"-{ends}", word[len(flags) + 1 :] or next(words, "")]
        elif word == "--check-hash-based-pycs":
            next(words, "")  # this option does not change which modules are loaded
    return options, None
