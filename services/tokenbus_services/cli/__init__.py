"""The command `tokenbus`: one module for each of its subcommands."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

_COMMANDS = {
    "check": "say whether message files hold, and if not, why",
    "demo": "show a batch built, encoded, read, broken and refused",
}
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status; a wrong use of the command line ends with status 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command, *rest = given or ["--help"]
    if command not in _COMMANDS:
        _parser().parse_args([command])  # help, the version, or an error: each of them ends here
    # Only the module that is asked for is imported, so that no command waits for another's libraries.
    module = importlib.import_module(f"tokenbus_services.cli.{command}")
    parser = argparse.ArgumentParser(prog=f"tokenbus {command}", formatter_class=argparse.RawDescriptionHelpFormatter)
    module.declare(parser)
    options = parser.parse_intermixed_args(rest)
    try:
        return int(module.run(options))
    except BrokenPipeError:
        # The reader went away, as `| head` does; what was asked for cannot be said to have held.
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, _COMMANDS))
    parser = argparse.ArgumentParser(
        prog="tokenbus",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="The token bus: every token an LLM engine emits, with its logprobs, bounded and in order.\n\n"
        "commands:\n" + "\n".join(f"  {name:{width}}  {summary}" for name, summary in _COMMANDS.items()),
        epilog="`tokenbus COMMAND --help` says more of each.",
    )
    parser.add_argument("--version", action="version", version=f"tokenbus {version('tokenbus')}")
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND", help="what to do")
    return parser
