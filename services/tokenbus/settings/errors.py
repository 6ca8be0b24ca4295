"""The error of the settings. Imports nothing else of ours, so that every module may raise it."""

import reprlib

from tokenbus.errors import UsageError

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


class SettingsError(UsageError, ValueError):
    """A setting is unknown or out of its range: which key, where it came from, the limit and the value.

    `key` is its name (``worker.id``); `where` is where it came from as a person would look for it: a variable, a
    file and the key in it, or the key alone; `limit` is a phrase; `actual` is the value, printable and short.
    """

    def __init__(self, key: str, limit: str, actual: object, where: str = "") -> None:
        """Keep the four; a value is kept as it is shown, because it may be of any size."""
        self.key = key
        self.limit = limit
        self.actual = actual if isinstance(actual, Shown) else Shown(shown(actual))
        self.where = where or key
        super().__init__(key, limit, self.actual, self.where)  # by which test runners send it across processes

    def __str__(self) -> str:
        """Return one line with the place, the limit and the value."""
        return f"{self.where}: {self.limit}" + (f", got {self.actual}" if self.actual else "")


class Shown(str):
    """A value that is shown as it is: quoted already, or in the place of a secret."""

    __slots__ = ()


def shown(value: object) -> str:
    """Return a value as one short printable line, as Python would write it."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a number of too many digits to print"
