"""The parser of the command line: argparse that allows options between file names and prints one-line errors."""

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from tokenbus.printable import printable

_MOST_DIGITS = 18
_REQUEST_IDS = 2**64
_ID_DIGITS = 16


class Parser(argparse.ArgumentParser):
    """A parser for a command with options and at most one list of positional arguments."""

    positional = "files"
    """The name of the list of positional arguments."""

    given: Sequence[str] = ()
    """The unparsed command line. Some commands read the value of one option before they declare other options."""
    keeps_rest = False
    """Whether the arguments after `--` are returned unparsed in `options.rest`."""
    _has_actions = False

    def options(self, given: Sequence[str]) -> argparse.Namespace:
        """Parse the command line. Arguments after `--` are positional, unless `keeps_rest` stores them in `rest`."""
        if self._has_actions:
            return self.parse_args(given)
        cut = given.index("--") if "--" in given else len(given)
        names = given[cut + 1 :]
        if self.keeps_rest:
            return self.parse_args(given[:cut], argparse.Namespace(rest=names))
        # Python 3.11 drops the `--` before it collects positional arguments, and then reads -name as an option.
        stand_ins = [f"./{name}" if name.startswith("-") else name for name in names]
        options = self.parse_intermixed_args([*given[:cut], *stand_ins])
        if names:
            getattr(options, self.positional)[-len(names) :] = names
        return options

    def actions(self, **summaries: str) -> "tuple[Parser, ...]":
        """Return a parser for each action in `summaries`. After parsing, `options.action` is the chosen action."""
        self._has_actions = True
        added = self.add_subparsers(dest="action", metavar="ACTION", required=True)
        return tuple(added.add_parser(name, help=summary, description=summary) for name, summary in summaries.items())

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))  # the message may contain arguments


def whole(least: int = 1, most: int | None = None) -> Callable[[str], int]:
    """Return the `type` of an option whose value is a whole number within bounds."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"

    def read(text: str) -> int:
        number = int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else -1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"a whole number {bounds}, got {text!r}")
        return number

    return read


def request_id(text: str) -> int:
    """Parse the id of a request, given as a number or as the 16 hexadecimal digits of logs and recordings."""
    with suppress(ValueError):
        number = int(text, 16) if len(text) == _ID_DIGITS else int(text, 0)
        if 0 < number < _REQUEST_IDS:
            return number
    raise argparse.ArgumentTypeError(f"a request's id, as 0000000000000011, 0x11 or 17, got {text!r}")
