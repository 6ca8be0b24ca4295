"""Defines ContractError. This module imports no other module of Tokenbus, to avoid import cycles."""

from enum import Enum

_LONGEST_VALUE = 200


class Rule(str, Enum):
    """The kind of the broken bound. The names are stable, because golden vectors and metrics contain them."""

    __str__ = str.__str__

    MALFORMED = "malformed"
    """The bytes are not an encoding of the message."""
    TYPE = "type"
    """A value that the encoder received has the wrong type for its field."""
    VERSION = "version"
    """The message has another major version of the schema."""
    REQUIRED = "required"
    """A required value is absent."""
    BYTES = "bytes"
    """A message or a string is longer than its bound."""
    ITEMS = "items"
    """A column has more elements than its bound."""
    LENGTH = "length"
    """A column's length does not fit the counts."""
    MIN = "min"
    """A value is below its bound."""
    MAX = "max"
    """A value is above its bound."""
    NAMED = "named"
    """The schema does not name this value of an enum."""
    UNIQUE = "unique"
    """A value occurs twice in a column of unique values."""
    FINITE = "finite"
    """A number is NaN or infinite."""
    STATUS = "status"
    """The status of the row forbids the value."""
    SCORING = "scoring"
    """The scoring of the row, or the value kind of the message, forbids the value."""
    KIND = "kind"
    """The kind of the batch forbids the value."""
    ORDER = "order"
    """Alternatives are not in descending order of value, or equal values are not in ascending order of id."""
    AGREEMENT = "agreement"
    """A sampled token's logprob or rank disagrees with its alternatives."""


_PHRASES = {
    Rule.MIN: "at least {}",
    Rule.MAX: "at most {}",
    Rule.ITEMS: "at most {} elements",
    Rule.BYTES: "at most {} bytes",
}


class ContractError(ValueError):
    """An error that names a wrong field, its limit and the actual value.

    `field` names a single element if possible (``token_counts[3]``). `limit` is the bound, as a number or a phrase.
    `actual` is the wrong value. `rule` names the kind of bound.
    """

    def __init__(self, field: str, limit: object, actual: object, *, rule: Rule = Rule.MALFORMED) -> None:
        super().__init__(field, limit, actual)
        self.field = field
        self.limit = limit
        self.actual = actual
        self.rule = rule

    def __str__(self) -> str:
        limit = _PHRASES.get(self.rule, "{}").format(self.limit)
        return f"{self.field}: {limit}, got {_one_line(self.actual)}"


def _one_line(value: object) -> str:
    """Return a value as one short line. The value may come from an untrusted peer."""
    try:
        text = str(value)
    except ValueError:  # Python refuses to print an integer with thousands of digits
        return "a number of too many digits to print"
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[: _LONGEST_VALUE + 1])
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "..."
