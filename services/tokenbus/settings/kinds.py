"""Declarations of settings as dataclass fields with a type and a `Meta`, which msgspec enforces."""

import contextlib
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
from msgspec import Meta

from tokenbus.settings.errors import SettingsError

_META = "meta"
_LARGEST_PORT = 65535
HOUR_MS = 3_600_000
_MANY = 2**31 - 1
_MOST_BYTES = 2**40
_BETWEEN = re.compile(r",\s*(?=[a-z]+://)")
"""Matches a comma between two addresses, but no comma within a path."""
_MOST_ADDRESSES = 64
_BETWEEN_WORDS = re.compile("(?<=[a-z])(?=[A-Z])")


# Each function below returns the dataclass field of a setting.


def count(default: int, unit: str, meaning: str, *, low: int = 1, high: int = _MANY) -> Any:  # noqa: ANN401
    return _field(default, whole(unit, meaning, low=low, high=high))


def milliseconds(default: int, meaning: str, *, low: int = 1, high: int = 24 * HOUR_MS) -> Any:  # noqa: ANN401
    return count(default, "ms", meaning, low=low, high=high)


def size(default: int, meaning: str) -> Any:  # noqa: ANN401
    return count(default, "bytes", meaning, high=_MOST_BYTES)


def choice(meaning: str, *, default: str | bool) -> Any:  # noqa: ANN401
    """Return a field of type bool or `Literal`."""
    return _field(default, Meta(description=meaning, extra={"valid": "true or false"}))


def text(default: str, low: int, high: int, meaning: str) -> Any:  # noqa: ANN401
    """Return a text field. `low` and `high` bound the number of UTF-8 bytes."""
    return _text(default, f"text of {low} to {high} bytes", lambda value: low <= len(value.encode()) <= high, meaning)


def path(meaning: str) -> Any:  # noqa: ANN401
    return text("", 0, 4096, meaning)


def endpoints(default: str, meaning: str) -> Any:  # noqa: ANN401
    """Return a field for a transport address or a comma-separated list of addresses."""

    def check(value: str) -> bool:
        found = listed_addresses(value)
        return len(set(found)) == len(found) <= _MOST_ADDRESSES and all(map(_is_endpoint, found))

    valid = "tcp://HOST:PORT, ipc://PATH or memory://NAME"
    several = f", or a comma-separated list of up to {_MOST_ADDRESSES} different ones"
    return _text(default, valid + several, check, meaning)


def host_and_port(default: str, meaning: str, *, may_be_empty: bool = True) -> Any:  # noqa: ANN401
    if not may_be_empty:
        return _text(default, "HOST:PORT", _is_host_and_port, meaning)
    return _text(default, "HOST:PORT, or empty", lambda value: not value or _is_host_and_port(value), meaning)


def whole(unit: str, meaning: str, *, low: int, high: int) -> Meta:
    return Meta(ge=low, le=high, description=meaning, extra={"valid": f"{low} to {high} {unit}".rstrip()})


def _text(default: str, valid: str, check: Callable[[str], bool], meaning: str) -> Any:  # noqa: ANN401
    return _field(default, Meta(description=meaning, extra={"valid": valid, "check": check}))


def _field(default: object, meta: Meta) -> Any:  # noqa: ANN401
    return field(default=default, metadata={_META: meta})


def listed_addresses(value: str) -> tuple[str, ...]:
    return tuple(_BETWEEN.split(value))


@dataclass(frozen=True, slots=True)
class Entry:
    """One setting, with its type, its limits and its default."""

    section: str
    name: str
    type: Any
    """The type: `int`, `bool`, `str` or a `Literal`."""
    meta: Meta
    default: object

    @property
    def key(self) -> str:
        """The name of the setting in files and on the command line."""
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        """The name of the environment variable."""
        return f"TOKENBUS_{self.section}_{self.name}".upper()

    @property
    def meaning(self) -> str:
        return str(self.meta.description)

    @property
    def valid(self) -> str:
        """The valid values, in words."""
        words = [word or "nothing" for word in get_args(self.type)]
        return f"one of {', '.join(words)}" if words else str((self.meta.extra or {})["valid"])

    def value_in(self, settings: object) -> object:
        return getattr(getattr(settings, self.section), self.name)

    def convert(self, value: object, where: str = "", *, is_text: bool = False) -> object:
        """Convert a value to the type of the setting. If `is_text`, the value is a text. Raises SettingsError."""
        check = (self.meta.extra or {}).get("check")
        with contextlib.suppress(ValueError):  # also raised for invalid UTF-8 and overlong numbers
            if is_text:
                with contextlib.suppress(ValueError):
                    value = msgspec.convert(value, self.type, strict=False)
            value = msgspec.convert(value, Annotated[self.type, self.meta])
            if check is None or check(value):
                return value
        raise SettingsError(self.key, self.valid, value, where=where)


class Section:
    """The base class of a section, a frozen dataclass that checks its values.

    The name of the class determines the keys. DurableLogSettings has the keys `durable_log.*`.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        for entry in entries_of(type(self)):  # type: ignore[arg-type]  # mypy does not see that a class is hashable
            entry.convert(getattr(self, entry.name))
        self._check_rules()

    def _check_rules(self) -> None:
        """Raise a SettingsError if values contradict each other."""


@functools.cache
def entries_of(section: type[Section]) -> tuple[Entry, ...]:
    """Return the settings of a section, which are the fields with a `Meta`. Other fields are constants."""
    types = get_type_hints(section)
    name = _BETWEEN_WORDS.sub("_", section.__name__.removesuffix("Settings")).lower()
    return tuple(
        Entry(name, item.name, types[item.name], item.metadata[_META], item.default)
        for item in fields(section)  # type: ignore[arg-type]  # every subclass is a dataclass
        if _META in item.metadata
    )


def _is_endpoint(value: str) -> bool:
    scheme, _, rest = value.partition("://")
    return value.isprintable() and (
        (scheme in ("ipc", "memory") and bool(rest))
        or (scheme == "tcp" and _is_host_and_port(f"{rest[:-1]}0" if rest.endswith(":*") else rest))
    )


def _is_host_and_port(text: str) -> bool:
    host, _, port = text.rpartition(":")
    if not text.isprintable() or not host.strip() or not re.fullmatch("[0-9]{1,5}", port):
        return False
    return int(port) <= _LARGEST_PORT
