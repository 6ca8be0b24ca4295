"""SettingsError, in a module that all other modules can import."""

import reprlib

from tokenbus.errors import UsageError

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


class SettingsError(UsageError, ValueError):
    """A setting is unknown or out of range.

    `key` is the name of the setting, such as ``worker.id``. `where` names the source of the value: a variable, a key of
    a file, or an override. `limit` says which values are valid. `actual` is the value, shortened and printable.
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
    """A value that is already quoted or redacted for display."""

    __slots__ = ()


def shown(value: object) -> str:
    """Return the shortened repr of a value."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # an integer with thousands of digits
        return "a number with too many digits to print"
