"""Makes untrusted values short, printable and safe for all JSON readers."""

import math
from collections.abc import Mapping, Sized
from collections.abc import Set as AbstractSet
from enum import Enum
from itertools import islice
from numbers import Integral, Real

from tokenbus.printable import printable

_LONGEST_TEXT = 300
_MOST_ITEMS = 16
_DEEPEST = 3
_LONGEST_TRACEBACK = 16_384
_EXACT_IN_JSON = 2**53
_KEY_BITS = 64
_KEYS = frozenset({"request", "requests", "request_id", "request_ids"})
_HIDDEN = frozenset({"secret", "secret_key", "proof"})


def safe(name: str, value: object) -> object:
    """Return a value in a form for logs, with request ids as 16 hexadecimal digits and with hidden secrets."""
    if name in _HIDDEN:
        return "(hidden)"
    return _safe(value, is_key=name in _KEYS, depth=0)


def safe_text(text: str) -> str:
    """Return text as one printable line of limited length."""
    short = printable(text[:_LONGEST_TEXT])
    return short if len(text) <= _LONGEST_TEXT else short + "..."


def safe_traceback(text: str) -> str:
    """Return the last lines of a traceback, indented so that no line looks like a log line."""
    lines = text[-_LONGEST_TRACEBACK:].splitlines()
    return "\n".join(f"    {printable(line)}" for line in lines)


def _safe(value: object, *, is_key: bool, depth: int) -> object:
    match value:
        case None | bool():
            shown: object = value
        case Enum():
            shown = value.name
        case Integral():
            shown = _number(int(value), is_key=is_key)
        case Real():  # Real includes numpy's numbers
            number = float(value)
            shown = number if math.isfinite(number) else str(number)
        case bytes() | bytearray():
            shown = safe_text(value[: _LONGEST_TEXT + 1].decode("ascii", "backslashreplace"))
        case BaseException():
            shown = safe_text(f"{type(value).__name__}: {_text(value)}")
        case Mapping() if depth < _DEEPEST:
            pairs = list(islice(value.items(), _MOST_ITEMS))
            shown = {safe_text(_text(key)): _safe(item, is_key=is_key, depth=depth + 1) for key, item in pairs}
            shown |= {"...": _more(value)} if len(value) > _MOST_ITEMS else {}
        case AbstractSet() | list() | tuple() if depth < _DEEPEST:
            shown = [_safe(item, is_key=is_key, depth=depth + 1) for item in islice(value, _MOST_ITEMS)]
            shown += [_more(value)] if len(value) > _MOST_ITEMS else []
        case _:
            shown = safe_text(_text(value))
    return shown


def _number(value: int, *, is_key: bool) -> object:
    if is_key and 0 <= value < 1 << _KEY_BITS:
        return f"{value:016x}"
    # Many JSON readers keep only 53 bits of an integer.
    return value if abs(value) <= _EXACT_IN_JSON else safe_text(_text(value))


def _more(value: Sized) -> str:
    return f"{len(value) - _MOST_ITEMS} more"


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - a broken __str__ must not break logging
        return f"({type(value).__name__} that cannot be shown: {type(error).__name__})"
