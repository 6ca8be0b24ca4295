"""The kinds of settings: what each may hold, how it is read from text, and what it means."""

import re
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from tokenbus_services.settings.errors import SettingsError

_KIND = "kind"
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+(?:_[0-9]+)*")
_LONGEST_NUMBER = 40
_TRUTH = {"true": True, "1": True, "false": False, "0": False}
_LARGEST_PORT = 65535
HOUR_MS = 3_600_000
_DAY_MS = 24 * HOUR_MS
_MANY = 2**31 - 1
_MOST_BYTES = 2**40


class Kind(Protocol):
    """What a setting may hold, in which unit, and what it means."""

    @property
    def unit(self) -> str:
        """The unit, or nothing where there is none."""

    @property
    def meaning(self) -> str:
        """What it is for, and what its special values mean."""

    @property
    def range(self) -> str:
        """What is valid, in words."""

    def read(self, text: str) -> object:
        """Return the value that a text from outside stands for; a text that is none comes back as it is."""

    def fault(self, value: object) -> str | None:
        """Return the limit that a value breaks, or None."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number within two bounds."""

    low: int
    high: int
    unit: str
    meaning: str

    @property
    def range(self) -> str:
        """Both bounds."""
        return f"{self.low} to {self.high}"

    def read(self, text: str) -> object:
        """Return the number in decimal digits, which may be grouped by underscores."""
        return int(text) if len(text) <= _LONGEST_NUMBER and _WHOLE_NUMBER.fullmatch(text) else text

    def fault(self, value: object) -> str | None:
        """Return the bound that is broken, or None."""
        if type(value) is not int:
            return "a whole number"
        if value < self.low:
            return f"at least {self.low}"
        return f"at most {self.high}" if value > self.high else None


@dataclass(frozen=True, slots=True)
class Share:
    """A number from 0 to 1."""

    meaning: str
    unit: str = "share"
    range: str = "0 to 1"

    def read(self, text: str) -> object:
        """Return the number."""
        try:
            return float(text)
        except ValueError:
            return text

    def fault(self, value: object) -> str | None:
        """Return that it is no such number, or None."""
        if type(value) not in (int, float) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            return "a number from 0 to 1"
        return None


@dataclass(frozen=True, slots=True)
class Flag:
    """Yes or no."""

    meaning: str
    unit: str = ""
    range: str = "true, false"

    def read(self, text: str) -> object:
        """Return the truth of true, false, 1 or 0."""
        return _TRUTH.get(text.lower(), text)

    def fault(self, value: object) -> str | None:
        """Return that it is neither, or None."""
        return None if type(value) is bool else "true or false"


@dataclass(frozen=True, slots=True)
class Text:
    """A text whose length in UTF-8 lies within two bounds."""

    low: int
    high: int
    meaning: str
    unit: str = ""

    @property
    def range(self) -> str:
        """Both lengths."""
        return f"{self.low} to {self.high} bytes"

    def read(self, text: str) -> object:
        """Return the text."""
        return text

    def fault(self, value: object) -> str | None:
        """Return that it is no text, or the length that is broken, or None."""
        if not isinstance(value, str):
            return "text"
        try:
            length = len(value.encode())
        except UnicodeEncodeError:  # what the environment held was no UTF-8
            return "text in UTF-8"
        return None if self.low <= length <= self.high else f"text of {self.range}"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]
    meaning: str
    unit: str = ""

    @property
    def range(self) -> str:
        """The words."""
        return ", ".join(self.words)

    def read(self, text: str) -> object:
        """Return the text."""
        return text

    def fault(self, value: object) -> str | None:
        """Return the words, if it is none of them, or None."""
        return None if isinstance(value, str) and value in self.words else f"one of {self.range}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a ZeroMQ socket binds or connects."""

    meaning: str
    unit: str = ""
    range: str = "tcp://HOST:PORT, ipc://PATH or memory://NAME"

    def read(self, text: str) -> object:
        """Return the text."""
        return text

    def fault(self, value: object) -> str | None:
        """Return the forms, if it has none of them, or None."""
        if isinstance(value, str) and value.isprintable():
            scheme, _, rest = value.partition("://")
            if scheme in ("ipc", "memory") and rest:
                return None
            if scheme == "tcp" and _is_host_and_port(rest, wildcard=True):
                return None
        return self.range


@dataclass(frozen=True, slots=True)
class HostAndPort:
    """Where a server listens, or nothing."""

    meaning: str
    unit: str = ""
    range: str = "HOST:PORT, or empty"

    def read(self, text: str) -> object:
        """Return the text."""
        return text

    def fault(self, value: object) -> str | None:
        """Return the form, if it has another, or None."""
        valid = isinstance(value, str) and value.isprintable() and (not value or _is_host_and_port(value))
        return None if valid else self.range


def count(unit: str, meaning: str, *, low: int = 1, high: int = _MANY) -> Whole:
    """Return the kind of a number of things."""
    return Whole(low, high, unit, meaning)


def milliseconds(meaning: str, *, low: int = 1, high: int = _DAY_MS) -> Whole:
    """Return the kind of a time."""
    return Whole(low, high, "ms", meaning)


def size(meaning: str) -> Whole:
    """Return the kind of a number of bytes."""
    return Whole(1, _MOST_BYTES, "bytes", meaning)


def setting(default: Any, kind: Kind) -> Any:  # noqa: ANN401 - a dataclass field stands for a value of its type
    """Return the dataclass field of one setting."""
    return field(default=default, metadata={_KIND: kind})


def kind_of(metadata: Any) -> Kind:  # noqa: ANN401 - a mapping that dataclasses leave untyped
    """Return what a dataclass field may hold, from its metadata."""
    kind: Kind = metadata[_KIND]
    return kind


def refuse(key: str, kind: Kind, value: object, where: str = "") -> None:
    """Raise a SettingsError if a value is none of its kind."""
    limit = kind.fault(value)
    if limit is not None:
        raise SettingsError(key, limit, value, where=where)


def check(section: object, name: str) -> None:
    """Raise a SettingsError if a value of a section is none of its kind."""
    for item in fields(section):  # type: ignore[arg-type]  # every caller is a dataclass
        refuse(f"{name}.{item.name}", kind_of(item.metadata), getattr(section, item.name))


def _is_host_and_port(text: str, *, wildcard: bool = False) -> bool:
    host, _, port = text.rpartition(":")
    if not host or host.isspace():
        return False
    if wildcard and port == "*":
        return True
    return port.isascii() and port.isdigit() and len(port) <= len(str(_LARGEST_PORT)) and int(port) <= _LARGEST_PORT
