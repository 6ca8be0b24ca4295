"""Checks of messages against their bounds, built once from the descriptor.

Each check is a function of the message alone, because all paths, bounds and nested checks are looked up in advance.
"""

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.schema import MAJOR, FieldRule, oneofs_of, rules_of

Check = Callable[[Any], None]
"""A function that raises a ContractError if a message breaks a bound."""

_LOWEST, _HIGHEST = -math.inf, math.inf
"""The range of a field without bounds."""
_UNSIGNED = (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)
_MOST_BYTES_OF_A_LETTER = 4
_FEW = 64
"""The length below which a list is checked one element at a time."""


def check_of(message: Descriptor, path: str = "") -> Check | None:
    """Return the check of a message, or None if the message has no bounds.

    `path` precedes the names of fields in errors. Members of a oneof are checked last.
    """
    by_name = {rule.name: rule for rule in rules_of(message)}
    choices = {
        name: {member: _nested(by_name.pop(member), path) for member in members}
        for name, members in oneofs_of(message).items()
    }
    numbers = [rule for rule in by_name.values() if _is_number(rule)]
    plain = [(attrgetter(rule.name), *_range(rule), rule) for rule in numbers if _range(rule) != (_LOWEST, _HIGHEST)]
    others = [_check(rule, path) for rule in by_name.values() if not _is_number(rule)]
    checks = [check for check in others if check is not None]
    checks += [_one_of(name, members, path) for name, members in choices.items()]
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
    """Return the check of a field other than a plain number, or None if any value is valid."""
    name, here = rule.name, path + rule.name
    if rule.field.is_repeated:
        return _repeated(rule, here)
    if rule.field.message_type is not None:
        return _submessage(rule, path)
    single = _single(rule)
    if single is None:
        return None
    get = attrgetter(name)
    if not rule.field.has_presence:
        return lambda message: single(get(message), here)

    def check(message: Any) -> None:  # noqa: ANN401
        if message.HasField(name):
            single(get(message), here)

    return check


def _single(rule: FieldRule) -> Callable[[Any, str], None] | None:
    """Return a function that checks one value and names its path in errors, or None if any value is valid."""
    if rule.field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _length_check(rule)
    (low, high), finite = _range(rule), rule.bounds.finite
    if not finite and (low, high) == (_LOWEST, _HIGHEST):
        return None

    def check(value: float, here: str) -> None:
        if finite and not math.isfinite(value):
            raise ContractError(here, "a finite number", value, rule=Rule.FINITE)
        if not low <= value <= high:
            raise beyond(here, value, rule)

    return check


def _length_check(rule: FieldRule) -> Callable[[Any, str], None] | None:
    """Return a function that checks the size of a string or bytes value, or None if any size is valid."""
    low, most = rule.bounds.min_bytes, rule.bounds.max_bytes if rule.bounds.HasField("max_bytes") else _HIGHEST
    if not low and most == _HIGHEST:
        return None
    surely_within = most / _MOST_BYTES_OF_A_LETTER

    def check(value: Any, here: str) -> None:  # noqa: ANN401 - text or bytes
        if low <= len(value) <= surely_within:
            return
        length = len(value.encode() if rule.is_text else value)
        if not low <= length <= most:
            raise _wrong_length(here, length, rule)

    return check


def _submessage(rule: FieldRule, path: str) -> Check:
    name, required, nested = rule.name, rule.bounds.required, _nested(rule, path)

    def check(message: Any) -> None:  # noqa: ANN401
        if message.HasField(name):
            if nested is not None:
                nested(getattr(message, name))
        elif required:
            raise ContractError(path + name, "a value", "none", rule=Rule.REQUIRED)

    return check


def _repeated(rule: FieldRule, here: str) -> Check:
    get, bounds, message = attrgetter(rule.name), rule.bounds, rule.field.message_type
    most = bounds.max_items if bounds.HasField("max_items") else _HIGHEST
    nested = None if message is None else check_of(message)
    single = _single(rule) if message is None else None
    is_unsigned, unique = rule.field.cpp_type in _UNSIGNED, bounds.unique

    def check(message: Any) -> None:  # noqa: ANN401
        values = get(message)
        count = len(values)
        if count > most:
            raise ContractError(here, most, count, rule=Rule.ITEMS)
        if is_unsigned and count >= _FEW and _hold_at_once(values, rule):
            return
        if nested is not None:
            _check_elements(values, nested, here)
        elif single is not None:
            for element, value in enumerate(values):
                single(value, f"{here}[{element}]")
        if unique:
            refuse_twice(values, here)

    return check


def _hold_at_once(values: Sequence[int], rule: FieldRule) -> bool:
    """Return whether all elements of a long list are valid. A prompt may have a million elements."""
    numbers = np.fromiter(values, np.uint64, len(values))
    low, high = _range(rule)
    if int(numbers.min()) < low or int(numbers.max()) > high:
        return False
    return not rule.bounds.unique or np.unique(numbers).size == numbers.size


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
    if rule.field.message_type is None:
        raise TypeError(f"{path}{rule.name}: only messages are checked where one of several may be set")
    return check_of(rule.field.message_type, f"{path}{rule.name}.")


def _is_number(rule: FieldRule) -> bool:
    """Return whether a field is a single, always present number or enum that only a range bounds."""
    field = rule.field
    is_other = field.is_repeated or field.has_presence or field.cpp_type == FieldDescriptor.CPPTYPE_STRING
    return not (is_other or field.message_type or rule.bounds.finite)


def _range(rule: FieldRule) -> tuple[float, float]:
    return _LOWEST if rule.min is None else rule.min, _HIGHEST if rule.max is None else rule.max


def beyond(here: str, value: float, rule: FieldRule) -> ContractError:
    """Return the error for a number outside its field's range."""
    if rule.name == "schema_major":
        limit = f"schema version {MAJOR} of package tokenbus.v{MAJOR}"
        return ContractError(here, limit, value, rule=Rule.VERSION)
    low, high = _range(rule)
    if value < low and (low or not rule.bounds.named):
        return ContractError(here, low, value, rule=Rule.MIN)
    if rule.bounds.named:
        return ContractError(here, "a value that the schema names", value, rule=Rule.NAMED)
    return ContractError(here, high, value, rule=Rule.MAX)


def _wrong_length(here: str, length: int, rule: FieldRule) -> ContractError:
    what, least = "text" if rule.is_text else "bytes", rule.bounds.min_bytes
    if not length:
        return ContractError(here, what, f"empty {what}", rule=Rule.REQUIRED)
    if length < least:
        return ContractError(here, f"at least {least} bytes", length, rule=Rule.REQUIRED)
    return ContractError(here, rule.bounds.max_bytes, length, rule=Rule.BYTES)


def refuse_twice(values: Sequence[Any], here: str) -> None:
    """Raise a ContractError for the first repeated value."""
    seen: dict[Any, int] = {}
    for element, value in enumerate(values):
        earlier = seen.setdefault(value, element)
        if earlier != element:
            limit = f"each value only once, and {here}[{earlier}] has it"
            raise ContractError(f"{here}[{element}]", limit, value, rule=Rule.UNIQUE)
