"""SettingsError, in a module that every other one can import."""

import reprlib

from tokenbus.errors import UsageError

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


class SettingsError(UsageError, ValueError):
    """A setting is unknown or out of range.

    `key` is its name (``worker.id``); `where` is its source: a variable, a file and a key in it, or the key alone;
    `limit` says which values are valid; `actual` is the value, shortened and printable.
    """

    def __init__(self, key: str, limit: str, actual: object, where: str = "") -> None:
        self.key = key
        self.limit = limit
        self.actual = actual if isinstance(actual, Shown) else Shown(shown(actual))
        self.where = where or key
        super().__init__(key, limit, self.actual, self.where)  # makes the error picklable

    def __str__(self) -> str:
        return f"{self.where}: {self.limit}" + (f", got {self.actual}" if self.actual else "")


class Shown(str):
    """A value in its displayed form, already quoted or redacted."""

    __slots__ = ()


def shown(value: object) -> str:
    """Return the repr of a value, shortened."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a number with too many digits to print"
