"""The fields of the settings' sections: a default with its range, its unit and its meaning."""

from dataclasses import fields

from tokenbus_services.settings.kinds import Whole, kind_of, refuse

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
MANY = 2**31 - 1
_MOST_BYTES = 2**40


def count(unit: str, meaning: str, *, low: int = 1, high: int = MANY) -> Whole:
    """Return the kind of a whole number of something."""
    return Whole(low, high, unit, meaning)


def time(meaning: str, *, low: int = 1, high: int = DAY_MS) -> Whole:
    """Return the kind of a time in milliseconds."""
    return Whole(low, high, "ms", meaning)


def size(meaning: str) -> Whole:
    """Return the kind of a size in bytes."""
    return Whole(1, _MOST_BYTES, "bytes", meaning)


def check(section: object, name: str) -> None:
    """Refuse the values of a section that are out of their range."""
    for item in fields(section):  # type: ignore[arg-type]  # every caller is a dataclass
        refuse(f"{name}.{item.name}", kind_of(item.metadata), getattr(section, item.name))
