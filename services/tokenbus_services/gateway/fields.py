"""What a field of a request may hold: each kind checks a value, and says the same as JSON Schema."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tokenbus_services.settings.errors import Shown, shown

Schema = dict[str, Any]


class FieldError(Exception):
    """A field of a request cannot be taken: where it is, what it may be, and what it was."""

    def __init__(self, where: str, limit: str, actual: object) -> None:
        """Keep where, and the line that says all of it."""
        super().__init__(
            f"{where or 'the body'}: {limit}, got {actual if isinstance(actual, Shown) else shown(actual)}"
        )
        self.where = where


class Kind(Protocol):
    """What a value may be."""

    def schema(self) -> Schema:
        """Return the kind as JSON Schema."""

    def read(self, value: Any, where: str) -> Any:  # noqa: ANN401 - JSON
        """Return the value, or raise a FieldError."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number within two bounds."""

    low: int
    high: int

    def schema(self) -> Schema:
        """Return both bounds."""
        return {"type": "integer", "minimum": self.low, "maximum": self.high}

    def read(self, value: Any, where: str) -> int:  # noqa: ANN401
        """Return the number; 5.0 is one too, as JSON has it."""
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not self.low <= value <= self.high:
            raise FieldError(where, f"a whole number from {self.low} to {self.high}", value)
        return value


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number within two bounds; the lower one may be left out."""

    low: float
    high: float
    above: bool = False

    def schema(self) -> Schema:
        """Return both bounds."""
        return {"type": "number", "exclusiveMinimum" if self.above else "minimum": self.low, "maximum": self.high}

    def read(self, value: Any, where: str) -> float:  # noqa: ANN401
        """Return the number."""
        if (
            type(value) not in (int, float)
            or not self.low <= value <= self.high
            or (self.above and value == self.low)
            or not math.isfinite(value)
        ):
            bounds = f"above {self.low:g} and at most" if self.above else f"from {self.low:g} to"
            raise FieldError(where, f"a number {bounds} {self.high:g}", value)
        return float(value)


@dataclass(frozen=True, slots=True)
class Truth:
    """Yes or no."""

    def schema(self) -> Schema:
        """Return the type."""
        return {"type": "boolean"}

    def read(self, value: Any, where: str) -> bool:  # noqa: ANN401
        """Return the truth."""
        if type(value) is not bool:
            raise FieldError(where, "true or false", value)
        return value


@dataclass(frozen=True, slots=True)
class Text:
    """A text of so many characters."""

    low: int
    high: int

    def schema(self) -> Schema:
        """Return both lengths."""
        return {"type": "string", "minLength": self.low, "maxLength": self.high}

    def read(self, value: Any, where: str) -> str:  # noqa: ANN401
        """Return the text."""
        if not isinstance(value, str):
            raise FieldError(where, "text", value)
        if not self.low <= len(value) <= self.high:
            raise FieldError(where, f"text of {self.low} to {self.high} characters", Shown(f"{len(value)} characters"))
        return value


@dataclass(frozen=True, slots=True)
class Only:
    """One of a few values: words, or what changes nothing where more is not offered."""

    values: tuple[Any, ...]

    def schema(self) -> Schema:
        """Return the values."""
        return {"enum": list(self.values)}

    def read(self, value: Any, where: str) -> Any:  # noqa: ANN401
        """Return the value."""
        for each in self.values:
            if value == each and isinstance(value, bool) == isinstance(each, bool):
                return each
        raise FieldError(where, f"one of {', '.join(map(repr, self.values))}", value)


@dataclass(frozen=True, slots=True)
class Many:
    """A list of one kind."""

    kind: Kind
    low: int
    high: int

    def schema(self) -> Schema:
        """Return both lengths, and the kind."""
        return {"type": "array", "items": self.kind.schema(), "minItems": self.low, "maxItems": self.high}

    def read(self, value: Any, where: str) -> list[Any]:  # noqa: ANN401
        """Return the list."""
        if not isinstance(value, list):
            raise FieldError(where, "a list", value)
        if not self.low <= len(value) <= self.high:
            raise FieldError(where, f"a list of {self.low} to {self.high} elements", Shown(f"{len(value)} elements"))
        return [self.kind.read(each, f"{where}[{place}]") for place, each in enumerate(value)]


@dataclass(frozen=True, slots=True)
class Ids:
    """A list of token ids, of which there may be very many."""

    most: int
    largest: int

    def schema(self) -> Schema:
        """Return the most, and the largest."""
        item = {"type": "integer", "minimum": 0, "maximum": self.largest}
        return {"type": "array", "items": item, "minItems": 1, "maxItems": self.most}

    def read(self, value: Any, where: str) -> list[int]:  # noqa: ANN401
        """Return the ids."""
        if not isinstance(value, list):
            raise FieldError(where, "a list of token ids", value)
        if not 1 <= len(value) <= self.most:
            raise FieldError(where, f"a list of 1 to {self.most} token ids", Shown(f"{len(value)} token ids"))
        if set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= self.largest:
            return value
        one = Whole(0, self.largest)
        return [one.read(each, f"{where}[{place}]") for place, each in enumerate(value)]


@dataclass(frozen=True, slots=True)
class Either:
    """One of several kinds, told apart by the value's type and, in lists, by their first element's."""

    kinds: tuple[Kind, ...]

    def schema(self) -> Schema:
        """Return the kinds."""
        return {"anyOf": [kind.schema() for kind in self.kinds]}

    def read(self, value: Any, where: str) -> Any:  # noqa: ANN401
        """Return what the first kind that takes the value makes of it, or raise what the nearest kind says."""
        nearest: FieldError | None = None
        for kind in self.kinds:
            try:
                return kind.read(value, where)
            except FieldError as error:
                # What the value was meant as says best what is wrong with it; else what looked deepest into it.
                if _fits_type(kind, value):
                    raise
                if nearest is None or len(error.where) > len(nearest.where):
                    nearest = error
        raise nearest or FieldError(where, "nothing at all", value)


@dataclass(frozen=True, slots=True)
class Field:
    """One field of an object: its name and kind, what it means, and what it is where it is left out."""

    name: str
    kind: Kind
    meaning: str
    default: Any = None
    required: bool = False

    def schema(self) -> Schema:
        """Return the field as JSON Schema; null stands for one that is left out."""
        schema = self.kind.schema()
        if not self.required:
            schema = {"anyOf": [schema, {"type": "null"}]} if "type" not in schema else _or_null(schema)
            if self.default is not None:
                schema["default"] = self.default
        return schema | {"description": self.meaning}


@dataclass(frozen=True, slots=True)
class Table:
    """An object with these fields and no other."""

    fields: tuple[Field, ...]

    def schema(self) -> Schema:
        """Return all fields."""
        required = [field.name for field in self.fields if field.required]
        return {
            "type": "object",
            "properties": {field.name: field.schema() for field in self.fields},
            "additionalProperties": False,
            **({"required": required} if required else {}),
        }

    def read(self, value: Any, where: str) -> dict[str, Any]:  # noqa: ANN401
        """Return every field's value, its default where it is left out."""
        if not isinstance(value, Mapping):
            raise FieldError(where, "an object", value)
        known = {field.name for field in self.fields}
        for name in value:
            if name not in known:
                raise FieldError(_within(where, shown(name)[1:-1]), "no such field", value[name])
        found = {}
        for field in self.fields:
            given = value.get(field.name)
            if given is not None:
                found[field.name] = field.kind.read(given, _within(where, field.name))
            elif field.required:
                raise FieldError(
                    _within(where, field.name), "it must be given", Shown("null" if field.name in value else "nothing")
                )
            else:
                found[field.name] = field.default
        return found


def _within(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _or_null(schema: Schema) -> Schema:
    return schema | {"type": [schema["type"], "null"]}


def _fits_type(kind: Kind, value: object) -> bool:
    """Tell whether a value is of a kind by its type and, where it is a list, by that of its first element."""
    if isinstance(kind, Text):
        return isinstance(value, str)
    if isinstance(kind, Table):
        return isinstance(value, Mapping)
    if not isinstance(kind, Many | Ids) or not isinstance(value, list):
        return False
    if isinstance(kind, Ids):
        return bool(value) and type(value[0]) in (int, float)
    return not value or _fits_type(kind.kind, value[0])
