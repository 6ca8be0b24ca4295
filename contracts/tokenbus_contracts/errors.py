"""The one error of the contract. Imports nothing of ours, so that every module may raise it."""

from enum import Enum

_LONGEST_VALUE = 200


class Rule(str, Enum):
    """Which kind of bound was broken; stable names, the same in the golden vectors and in metrics."""

    __str__ = str.__str__

    MALFORMED = "malformed"
    """The bytes are no encoding of the message at all."""
    TYPE = "type"
    """A value handed to the encoder is of another type than its field."""
    VERSION = "version"
    """The schema's major version is not the one that is read here."""
    REQUIRED = "required"
    """A part that must be there is absent."""
    BYTES = "bytes"
    """A message or a string is longer than its bound."""
    ITEMS = "items"
    """A column has more elements than its bound."""
    LENGTH = "length"
    """A column has another length than the counts demand."""
    MIN = "min"
    """A value is below its bound."""
    MAX = "max"
    """A value is above its bound."""
    NAMED = "named"
    """An enum's value is none that the schema names."""
    UNIQUE = "unique"
    """A value appears twice in a column that has each only once."""
    FINITE = "finite"
    """A number is NaN or infinite."""
    STATUS = "status"
    """A row carries what its status forbids."""
    SCORING = "scoring"
    """A row or a message carries what its scoring forbids."""
    KIND = "kind"
    """A row carries what the batch's kind forbids."""
    ORDER = "order"
    """Alternatives are not in order: by value, the largest first, ties by the lower id."""
    AGREEMENT = "agreement"
    """A sampled token's logprob or rank disagrees with its alternatives."""


_PHRASES = {
    Rule.MIN: "at least {}",
    Rule.MAX: "at most {}",
    Rule.ITEMS: "at most {} elements",
    Rule.BYTES: "at most {} bytes",
}


class ContractError(ValueError):
    """Something breaks the contract: which field, the limit, and the actual value.

    `field` names a single element where one can be named (``token_counts[3]``); `limit` is the bound, a
    number or a phrase; `actual` is what came instead; `rule` is the kind of bound, for machines.
    """

    def __init__(self, field: str, limit: object, actual: object, *, rule: Rule = Rule.MALFORMED) -> None:
        """Keep the four; the message is made from them when it is asked for."""
        super().__init__(field, limit, actual)
        self.field = field
        self.limit = limit
        self.actual = actual
        self.rule = rule

    def __str__(self) -> str:
        """Return one line with the field, the limit and the value."""
        limit = _PHRASES.get(self.rule, "{}").format(self.limit)
        return f"{self.field}: {limit}, got {_one_line(self.actual)}"

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the rule, which is no positional argument: test runners send errors across processes."""
        return (_rebuild, (self.field, self.limit, self.actual, self.rule))


def _one_line(value: object) -> str:
    """Return a value as one short line, whatever it is: it may have come from anywhere."""
    try:
        text = str(value)
    except ValueError:  # an integer of thousands of digits
        return "a number of too many digits to print"
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[: _LONGEST_VALUE + 1])
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "..."


def _rebuild(field: str, limit: object, actual: object, rule: Rule) -> ContractError:
    return ContractError(field, limit, actual, rule=rule)
