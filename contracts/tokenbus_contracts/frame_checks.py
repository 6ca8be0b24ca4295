"""Checks of messages against their bounds, built once from the descriptor.

Each check is a function of only the message: its paths, bounds and nested checks are looked up when it is made.
"""

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from google.protobuf.descriptor import Descriptor

from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.schema import MAJOR, FieldRule, oneofs_of, rules_of

Check = Callable[[Any], None]
"""Raises a ContractError for a message that breaks a bound."""

_LOWEST, _HIGHEST = -math.inf, math.inf
"""The range of a field without bounds."""
_MOST_BYTES_OF_A_LETTER = 4
_FEW = 64
"""Shorter lists are checked one element at a time."""


def check_of(message: Descriptor, path: str = "") -> Check | None:
    """Return the check of a message, or None if it has no bounds; `path` precedes its fields' names in errors.

    Members of a oneof are checked last.
    """
    oneofs = oneofs_of(message)
    by_name = {rule.name: rule for rule in rules_of(message)}
    rules = [rule for name, rule in by_name.items() if not any(name in members for members in oneofs.values())]
    numbers = [
        (attrgetter(rule.name), *_range(rule), rule) for rule in rules if _is_number(rule) and not rule.has_presence
    ]
    plain = [number for number in numbers if number[1:3] != (_LOWEST, _HIGHEST)]
    others = [_check(rule, path) for rule in rules if not _is_number(rule) or rule.has_presence]
    checks = [check for check in others if check is not None]
    for name, members in oneofs.items():
        checks.append(_one_of(name, {member: _nested(by_name[member], path) for member in members}, path))
    if not plain and not checks:
        return None

    def check(value: Any) -> None:  # noqa: ANN401 - a message of any type
        for get, low, high, rule in plain:
            if not low <= get(value) <= high:
                raise beyond(path + rule.name, get(value), rule)
        for one in checks:
            one(value)

    return check


def _check(rule: FieldRule, path: str) -> Check | None:
    """Return the check of a field that is more than a plain number; None: any value is valid."""
    name, here = rule.name, path + rule.name
    if rule.repeated:
        return _repeated(rule, here)
    if rule.message is not None:
        return _submessage(rule, path)
    single = _single(rule)
    if single is None:
        return None
    get = attrgetter(name)
    if not rule.has_presence:
        return lambda message: single(get(message), here)

    def check(message: Any) -> None:  # noqa: ANN401
        if message.HasField(name):
            single(get(message), here)

    return check


def _single(rule: FieldRule) -> Callable[[Any, str], None] | None:
    """Return the check of one value and its path; None: any value is valid."""
    if rule.is_text or rule.is_bytes:
        return _length_check(rule)
    low, high = _range(rule)
    if not rule.finite and (low, high) == (_LOWEST, _HIGHEST):
        return None

    def check(value: float, here: str) -> None:
        if rule.finite and not math.isfinite(value):
            raise ContractError(here, "a finite number", value, rule=Rule.FINITE)
        if not low <= value <= high:
            raise beyond(here, value, rule)

    return check


def _length_check(rule: FieldRule) -> Callable[[Any, str], None] | None:
    """Return the check of the length in bytes of text or bytes; None: any length is valid."""
    low, most = rule.min_bytes, _HIGHEST if rule.max_bytes is None else rule.max_bytes
    if not low and rule.max_bytes is None:
        return None
    surely_within = most / _MOST_BYTES_OF_A_LETTER

    def check(value: Any, here: str) -> None:  # noqa: ANN401 - text or bytes
        if low <= len(value) <= surely_within:
            return
        length = len(value.encode() if rule.is_text else value)
        if not low <= length <= most:
            raise _wrong_length(here, length, rule, "text" if rule.is_text else "bytes")

    return check


def _submessage(rule: FieldRule, path: str) -> Check:
    name, required = rule.name, rule.required
    nested = _nested(rule, path)

    def check(message: Any) -> None:  # noqa: ANN401
        if message.HasField(name):
            if nested is not None:
                nested(getattr(message, name))
        elif required:
            raise ContractError(path + name, "a value", "none", rule=Rule.REQUIRED)

    return check


def _repeated(rule: FieldRule, here: str) -> Check:
    get = attrgetter(rule.name)
    most = _HIGHEST if rule.max_items is None else rule.max_items
    nested = None if rule.message is None else check_of(rule.message)
    single = None if rule.message is not None else _single(rule)

    def check(message: Any) -> None:  # noqa: ANN401
        values = get(message)
        count = len(values)
        if count > most:
            raise ContractError(here, most, count, rule=Rule.ITEMS)
        if rule.is_unsigned and count >= _FEW and _hold_at_once(values, rule):
            return
        if nested is not None:
            _check_elements(values, nested, here)
        elif single is not None:
            for element, value in enumerate(values):
                single(value, f"{here}[{element}]")
        if rule.unique:
            refuse_twice(values, here)

    return check


def _hold_at_once(values: Sequence[int], rule: FieldRule) -> bool:
    """Tell whether all elements of a long list are valid: a prompt may have a million."""
    numbers = np.fromiter(values, np.uint64, len(values))
    low, high = _range(rule)
    if int(numbers.min()) < low or int(numbers.max()) > high:
        return False
    return not rule.unique or np.unique(numbers).size == numbers.size


def _check_elements(values: Sequence[Any], nested: Check, here: str) -> None:
    for element, value in enumerate(values):
        try:
            nested(value)
        except ContractError as error:
            field = f"{here}[{element}].{error.field}"
            raise ContractError(field, error.limit, error.actual, rule=error.rule) from None


def _one_of(name: str, members: dict[str, Check | None], path: str) -> Check:
    def check(message: Any) -> None:  # noqa: ANN401
        member = message.WhichOneof(name)
        if member is None:
            raise ContractError(path + name, f"one of {', '.join(members)}", "none", rule=Rule.REQUIRED)
        nested = members[member]
        if nested is not None:
            nested(getattr(message, member))

    return check


def _nested(rule: FieldRule, path: str) -> Check | None:
    if rule.message is None:
        raise TypeError(f"{path}{rule.name}: only messages are checked where one of several may be set")
    return check_of(rule.message, f"{path}{rule.name}.")


def _is_number(rule: FieldRule) -> bool:
    """Tell whether a field is one number or enum whose only bound is a range."""
    return not (rule.repeated or rule.message or rule.is_text or rule.is_bytes or rule.finite)


def _range(rule: FieldRule) -> tuple[float, float]:
    return _LOWEST if rule.min is None else rule.min, _HIGHEST if rule.max is None else rule.max


def beyond(here: str, value: float, rule: FieldRule) -> ContractError:
    """Return the error for a number outside its field's range."""
    if rule.name == "schema_major":
        limit = f"schema version {MAJOR} of package tokenbus.v{MAJOR}"
        return ContractError(here, limit, value, rule=Rule.VERSION)
    low, high = _range(rule)
    if value < low and (low or not rule.named):
        return ContractError(here, low, value, rule=Rule.MIN)
    if rule.named:
        return ContractError(here, "a value that the schema names", value, rule=Rule.NAMED)
    return ContractError(here, high, value, rule=Rule.MAX)


def _wrong_length(here: str, length: int, rule: FieldRule, what: str) -> ContractError:
    if not length:
        return ContractError(here, what, f"empty {what}", rule=Rule.REQUIRED)
    if length < rule.min_bytes:
        return ContractError(here, f"at least {rule.min_bytes} bytes", length, rule=Rule.REQUIRED)
    return ContractError(here, rule.max_bytes, length, rule=Rule.BYTES)


def refuse_twice(values: Sequence[Any], here: str) -> None:
    """Raise the error for the first value that comes twice, if any does."""
    seen: dict[Any, int] = {}
    for element, value in enumerate(values):
        earlier = seen.setdefault(value, element)
        if earlier != element:
            limit = f"each value only once, and {here}[{earlier}] has it"
            raise ContractError(f"{here}[{element}]", limit, value, rule=Rule.UNIQUE)
