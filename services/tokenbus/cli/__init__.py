"""The command `tokenbus`, with one module for each subcommand."""

import argparse
import gc
import importlib
import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from types import ModuleType
from typing import TextIO

from tokenbus.cli.arguments import Parser
from tokenbus.cli.errors import WRONG_USE, CommandError
from tokenbus.errors import UsageError
from tokenbus.plugins import PluginError
from tokenbus.printable import printable, reason_of
from tokenbus.python_version import PythonVersionError

_GROUPS = {
    "run": {
        "demo": "start a system, send 200 requests, check every token, and stop",
        "up": "run a whole system on this machine",
        "processor": "receive tokens from workers and deliver them to clients",
        "worker": "run an engine and publish its tokens",
        "gateway": "serve OpenAI's API and the inspector's page over HTTP",
        "fastdeploy": "run FastDeploy with Tokenbus in place of its queue",
    },
    "look": {
        "ask": "send one prompt and print the answer, coloured by probability",
        "tap": "watch the workers' streams live, or read a durable log",
        "record": "write the workers' streams to files, or to a durable log in NATS JetStream",
        "inspect": "show a recording's tokens, coloured by probability",
        "export": "convert a recording to Parquet, for pyarrow, DuckDB and datasets",
    },
    "keys": {
        "keys": "create keys for encrypted TCP, and manage the list of keys that may connect",
        "api-keys": "create, list and revoke API keys of the gateway",
    },
    "schema": {
        "check": "validate message files and recordings",
        "schema": "print the schema in other formats, or show what a schema change breaks",
    },
}
"""The subcommands by purpose, in the order in which a new user needs them."""
_COMMANDS = [name for group in _GROUPS.values() for name in group]
_ELSEWHERE = {"fastdeploy": "tokenbus.engines.fastdeploy_switch.command"}
"""The modules of subcommands that are not in this folder."""
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status, which is 2 for a usage error."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:  # the shell closed standard output with `>&-`
        _complain("standard output is closed")
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # print even if the terminal's encoding lacks a character
    try:
        status = _status(given or ["--help"])
        sys.stdout.flush()  # flush now, while a failure can still be reported
    except BrokenPipeError:
        _discard_output(sys.stdout)  # the reader is gone, for example `| head`
        return 1
    except OSError as error:
        subject = error.filename
        if subject is None:  # errors of standard output have no file name
            _discard_output(sys.stdout)
            subject = "cannot write to standard output"
        _complain(f"{subject}: {reason_of(error)}")
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return status


def _status(given: list[str]) -> int:
    command, *rest = given
    try:
        if command not in _COMMANDS:
            _parser().parse_args([command])
        found = _imported(_ELSEWHERE.get(command, f"tokenbus.cli.{command.replace('-', '_')}"))
        parser = Parser(prog=f"tokenbus {command}", formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.given = rest
        found.declare(parser)
        return int(found.run(parser.options(rest)))
    except SystemExit as end:  # argparse exits, but the caller must flush the output
        return int(end.code or 0)
    except (CommandError, UsageError, PluginError, PythonVersionError) as error:
        _complain(str(error))
        if isinstance(error, CommandError):
            return error.status
        return WRONG_USE if isinstance(error, UsageError) else 1


def _imported(name: str) -> ModuleType:
    # A garbage collection would take a tenth of the start time and free nothing, because modules stay in memory.
    gc.disable()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PythonVersionError.instead_of(error, "this command") from None
    finally:
        gc.enable()


def _complain(message: str) -> None:
    if sys.stderr is None:  # standard error is closed
        return
    try:
        print(f"tokenbus: {printable(message)}", file=sys.stderr, flush=True)
    except OSError:
        _discard_output(sys.stderr)


def _discard_output(stream: TextIO) -> None:
    """Discard the buffered output, because Python would try to write it at exit and fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _parser() -> Parser:
    width = max(map(len, _COMMANDS))
    listed = (
        f"{heading}:\n" + "".join(f"  {name:{width}}  {summary}\n" for name, summary in group.items())
        for heading, group in _GROUPS.items()
    )
    parser = Parser(
        prog="tokenbus",
        usage="tokenbus COMMAND [options]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="The token bus: delivers every token of an LLM engine, with its logprobs, in order.\n\n"
        + "\n".join(listed),
        epilog="`tokenbus COMMAND --help` shows the options of a command, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"tokenbus {version('tokenbus')}")
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser
