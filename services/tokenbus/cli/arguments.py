"""The command line's parser: argparse, with options between names and with errors of one line."""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from tokenbus.printable import printable

_MOST_DIGITS = 18
_REQUEST_IDS = 2**64
_ID_DIGITS = 16


class Parser(argparse.ArgumentParser):
    """An argparse parser for a command with options and, perhaps, one list of positional arguments."""

    positional = "files"
    """The name of that list."""

    declare_later: Callable[[Sequence[str]], None] | None = None
    """Called with the command line before it is read, to declare options that depend on another option's value."""
    keeps_rest = False
    """Whether what follows `--` is not read at all, and returned as `options.rest`."""

    def options(self, given: Sequence[str]) -> argparse.Namespace:
        """Return the options; they may stand between the positional arguments, and none stands after `--`."""
        if self.declare_later is not None:
            self.declare_later(given)
        cut = given.index("--") if "--" in given else len(given)
        names = given[cut + 1 :]
        if self.keeps_rest:
            return self.parse_args(given[:cut], argparse.Namespace(rest=names))
        # Python 3.11 forgets the `--` before it reads positional arguments, and would take -name for an option again.
        stand_ins = [f"./{name}" if name.startswith("-") else name for name in names]
        options = self.parse_intermixed_args([*given[:cut], *stand_ins])
        if names:
            getattr(options, self.positional)[-len(names) :] = names
        return options

    def error(self, message: str) -> NoReturn:
        """End with status 2 and a line that says what is wrong; it may quote anything that was typed."""
        super().error(printable(message))

    def _print_message(self, message: str, file: Any = None) -> None:  # noqa: ANN401 - whatever can be written to
        """Print help and the version; argparse's own hides that standard output takes nothing."""
        if message and file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)


def whole(least: int = 1, most: int | None = None) -> Callable[[str], int]:
    """Return what reads an option's value: a whole number within bounds."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"

    def read(text: str) -> int:
        number = int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else -1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"a whole number {bounds}, got {text!r}")
        return number

    return read


def request_id(text: str) -> int:
    """Return a request's id as an option has it: the 16 hex digits that people are shown, or a number."""
    with suppress(ValueError):
        number = int(text, 16) if len(text) == _ID_DIGITS else int(text, 0)
        if 0 < number < _REQUEST_IDS:
            return number
    raise argparse.ArgumentTypeError(f"a request's id, as 0000000000000011, 0x11 or 17, got {text!r}")
