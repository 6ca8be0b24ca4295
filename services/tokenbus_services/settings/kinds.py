"""The kinds of settings: what each may hold, how it is read from text, and what it means.

A kind is a few lines of our own rather than a type of msgspec or pydantic: a refused value is reported in one line with
key, limit and value, lengths are in bytes, addresses have forms of their own, and the page of all settings needs each
range in words.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from tokenbus_services.settings.errors import SettingsError

_KIND = "kind"
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+(?:_[0-9]+)*")
_LONGEST_NUMBER = 40
_TRUTH = {"true": True, "1": True, "false": False, "0": False}
_LARGEST_PORT = 65535
HOUR_MS = 3_600_000
_DAY_MS = 24 * HOUR_MS
_MANY = 2**31 - 1
_BETWEEN = re.compile(r",\s*(?=[a-z]+://)")
"""What separates two addresses; a comma in a path does not."""
_MOST_ADDRESSES = 64
_ENDPOINTS = "tcp://HOST:PORT, ipc://PATH, memory://NAME or nats://HOST:PORT/NAME"
_MOST_BYTES = 2**40


@dataclass(frozen=True, slots=True)
class Kind:
    """What a setting may hold, in which unit, and what it means."""

    meaning: str
    """What it is for, and what its special values mean."""
    range: str
    """What is valid, in words."""
    fault: Callable[[Any], str | None]
    """Returns the limit that a value breaks, or None."""
    read: Callable[[str], object] = str
    """Returns the value that a text stands for; a text that stands for none comes back as it is."""
    unit: str = ""


def whole(low: int, high: int, unit: str, meaning: str) -> Kind:
    """Return the kind of a whole number; its digits may be grouped by underscores."""

    def fault(value: Any) -> str | None:  # noqa: ANN401 - whatever a file holds
        if type(value) is not int:
            return "a whole number"
        if value < low:
            return f"at least {low}"
        return f"at most {high}" if value > high else None

    def read(text: str) -> object:
        return int(text) if len(text) <= _LONGEST_NUMBER and _WHOLE_NUMBER.fullmatch(text) else text

    return Kind(meaning, f"{low} to {high}", fault, read, unit)


# Each of the following returns the dataclass field of a setting, which stands for a value of its type.


def count(default: int, unit: str, meaning: str, *, low: int = 1, high: int = _MANY) -> Any:  # noqa: ANN401
    """Return the field of a number of things."""
    return _field(default, whole(low, high, unit, meaning))


def milliseconds(default: int, meaning: str, *, low: int = 1, high: int = _DAY_MS) -> Any:  # noqa: ANN401
    """Return the field of a time."""
    return count(default, "ms", meaning, low=low, high=high)


def size(default: int, meaning: str) -> Any:  # noqa: ANN401
    """Return the field of a number of bytes."""
    return count(default, "bytes", meaning, high=_MOST_BYTES)


def share(default: float, meaning: str) -> Any:  # noqa: ANN401
    """Return the field of a number from 0 to 1."""

    def fault(value: Any) -> str | None:  # noqa: ANN401
        return None if type(value) in (int, float) and 0 <= value <= 1 else "a number from 0 to 1"

    def read(text: str) -> object:
        try:
            return float(text)
        except ValueError:
            return text

    return _field(default, Kind(meaning, "0 to 1", fault, read, "share"))


def flag(meaning: str, *, default: bool) -> Any:  # noqa: ANN401
    """Return the field of true or false."""

    def fault(value: Any) -> str | None:  # noqa: ANN401
        return None if type(value) is bool else "true or false"

    return _field(default, Kind(meaning, "true, false", fault, lambda text: _TRUTH.get(text.lower(), text)))


def text(default: str, low: int, high: int, meaning: str) -> Any:  # noqa: ANN401
    """Return the field of a text whose length in UTF-8 lies within two bounds, in bytes."""
    valid = f"{low} to {high} bytes"

    def fault(value: Any) -> str | None:  # noqa: ANN401
        if not isinstance(value, str):
            return "text"
        try:
            length = len(value.encode())
        except UnicodeEncodeError:  # what the environment held was no UTF-8
            return "text in UTF-8"
        return None if low <= length <= high else f"text of {valid}"

    return _field(default, Kind(meaning, valid, fault))


def path(default: str, meaning: str) -> Any:  # noqa: ANN401
    """Return the field of a file's path, or nothing."""
    return text(default, 0, 4096, meaning)


def choice(default: str, words: tuple[str, ...], meaning: str) -> Any:  # noqa: ANN401
    """Return the field of one of a few words."""
    valid = ", ".join(words)

    def fault(value: Any) -> str | None:  # noqa: ANN401
        return None if isinstance(value, str) and value in words else f"one of {valid}"

    return _field(default, Kind(meaning, valid, fault))


def listed_addresses(value: str) -> tuple[str, ...]:
    """Return the addresses of a list with commas between."""
    return tuple(_BETWEEN.split(value))


def endpoint(default: str, meaning: str) -> Any:  # noqa: ANN401
    """Return the field of an address at which a transport listens or connects."""

    def fault(value: Any) -> str | None:  # noqa: ANN401
        return None if _is_endpoint(value) else _ENDPOINTS

    return _field(default, Kind(meaning, _ENDPOINTS, fault))


def endpoints(default: str, meaning: str) -> Any:  # noqa: ANN401
    """Return the field of one such address or of several, with commas between."""
    valid = f"{_ENDPOINTS}, or up to {_MOST_ADDRESSES} of them with commas between"

    def fault(value: Any) -> str | None:  # noqa: ANN401
        found = listed_addresses(value) if isinstance(value, str) else ()
        if len(found) > _MOST_ADDRESSES or not all(map(_is_endpoint, found or [value])):
            return valid if len(found) > 1 else _ENDPOINTS
        return None if len(set(found)) == len(found) else "each address once"

    return _field(default, Kind(meaning, valid, fault))


def host_and_port(default: str, meaning: str) -> Any:  # noqa: ANN401
    """Return the field of an address at which a server listens, or nothing."""
    form = "HOST:PORT, or empty"

    def fault(value: Any) -> str | None:  # noqa: ANN401
        valid = isinstance(value, str) and value.isprintable() and (not value or _is_host_and_port(value))
        return None if valid else form

    return _field(default, Kind(meaning, form, fault))


def _field(default: object, kind: Kind) -> Any:  # noqa: ANN401
    return field(default=default, metadata={_KIND: kind})


def kind_of(metadata: Any) -> Kind:  # noqa: ANN401 - a mapping that dataclasses leave untyped
    """Return a dataclass field's kind, from its metadata."""
    kind: Kind = metadata[_KIND]
    return kind


def refuse(key: str, kind: Kind, value: object, where: str = "") -> None:
    """Raise a SettingsError if a value is none of its kind."""
    limit = kind.fault(value)
    if limit is not None:
        raise SettingsError(key, limit, value, where=where)


class Section:
    """A section of the settings: a frozen dataclass that refuses values out of range."""

    __slots__ = ()
    section: ClassVar[str]
    """Its name in keys."""

    def __post_init__(self) -> None:
        """Raise a SettingsError at the first value that is none of its kind, or that contradicts another."""
        for item in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            refuse(f"{self.section}.{item.name}", kind_of(item.metadata), getattr(self, item.name))
        self._check_rules()

    def _check_rules(self) -> None:
        """Raise a SettingsError if values contradict each other."""


def _is_endpoint(value: object) -> bool:
    if not isinstance(value, str) or not value.isprintable():
        return False
    scheme, _, rest = value.partition("://")
    match scheme:
        case "ipc" | "memory":
            return bool(rest)
        case "tcp":
            return _is_host_and_port(rest, wildcard=True)
        case "nats" | "tls":
            servers, _, name = rest.partition("/")
            return bool(name) and all(map(_is_host_and_port, servers.split(",")))
    return False


def _is_host_and_port(text: str, *, wildcard: bool = False) -> bool:
    host, _, port = text.rpartition(":")
    if not host or host.isspace():
        return False
    if wildcard and port == "*":
        return True
    return port.isascii() and port.isdigit() and len(port) <= len(str(_LARGEST_PORT)) and int(port) <= _LARGEST_PORT
