"""For every bound of every field of the control frames: a frame just within it, and one just beyond."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tokenbus_contracts import Rule
from tokenbus_contracts.generated import bounds_pb2
from tokenbus_contracts.schema import bounds_in, fields_of, oneofs_of

_MANY = 100
"""More elements than are looked at one by one."""
_LONG = 10_000
FLOATS = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)


@dataclass(frozen=True)
class Case:
    """A frame that is valid but for one field, and what that field breaks, if anything."""

    kind: str
    what: str
    frame: type[Message]
    path: tuple[str, ...]
    put: Callable[[Any], None]
    rule: Rule | None = None
    element: str = ""
    is_long: bool = False
    """Whether the field is a list of thousands."""

    @property
    def message(self) -> Message:
        return with_field(cast("Descriptor", self.frame.DESCRIPTOR), self.path, self.put)

    @property
    def field(self) -> str:
        """The field as an error names it: of a list of messages, in its first element."""
        message, names = cast("Descriptor", self.frame.DESCRIPTOR), list(self.path)
        for place, name in enumerate(self.path[:-1]):
            field = message.fields_by_name[name]
            names[place] += "[0]" if field.is_repeated else ""
            message = cast("Descriptor", field.message_type)
        return ".".join(names) + self.element

    def __str__(self) -> str:
        return f"{self.frame.__name__}.{self.field}-{self.what}"


def with_field(message: Descriptor, path: tuple[str, ...], put: Callable[[Any], None]) -> Message:
    """Return a message that is valid and as small as can be, with one field put into it."""
    made: Any = GetMessageClass(message)()
    inner = path[0] if len(path) > 1 else ""
    chosen = {members[0] for members in oneofs_of(message).values() if path[0] not in members}
    for field in fields_of(message):
        bounds = bounds_in(field.GetOptions())
        if field.name == inner or field.name in chosen or bounds.required:
            nested = cast("Descriptor", field.message_type)
            rest, put_rest = (path[1:], put) if field.name == inner else (("",), put_nothing)
            value = getattr(made, field.name).add() if field.is_repeated else getattr(made, field.name)
            value.CopyFrom(with_field(nested, rest, put_rest))
            value.SetInParent()
        elif not field.is_repeated and not field.has_presence and (bounds.min or bounds.min_bytes):
            setattr(made, field.name, _smallest(field, bounds))
    if not inner:
        put(made)
    return cast("Message", made)


def put_nothing(message: Any) -> None:  # noqa: ANN401
    del message


def _smallest(field: FieldDescriptor, bounds: bounds_pb2.FieldBounds) -> int | str | bytes:
    if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        return _text(field, bounds.min_bytes)
    return bounds.min


def _text(field: FieldDescriptor, length: int) -> str | bytes:
    return "x" * length if field.type == FieldDescriptor.TYPE_STRING else b"\xff" * length


def put_value(name: str, value: object) -> Callable[[Any], None]:
    return lambda message: setattr(message, name, value)


def _fill(name: str, values: list[Any]) -> Callable[[Any], None]:
    return lambda message: getattr(message, name).extend(values)


def _fill_up(field: FieldDescriptor, count: int) -> Callable[[Any], None]:
    return lambda message: getattr(message, field.name).extend(_distinct(field, count))


def _clear(name: str) -> Callable[[Any], None]:
    return lambda message: message.ClearField(name)


def _values(field: FieldDescriptor) -> Iterator[tuple[str, str, object, Rule | None]]:
    """Yield values at the edge of each bound of a single value: just in, and just out with the rule it breaks."""
    bounds = bounds_in(field.GetOptions())
    version = Rule.VERSION if field.name == "schema_major" else None
    step: float = 0.25 if field.type in FLOATS else 1
    if bounds.HasField("min"):
        yield "min", "min", bounds.min, None
        if bounds.min or step < 1:
            yield "min", "below min", bounds.min - step, version or Rule.MIN
    if bounds.HasField("least"):
        yield "least", "least", bounds.least, None
        yield "least", "below least", bounds.least - step, Rule.MIN
    if bounds.HasField("max"):
        yield "max", "max", bounds.max, None
        yield "max", "above max", bounds.max + step, version or Rule.MAX
    if bounds.named:
        highest = max(value.number for value in cast("Any", field.enum_type).values)
        yield "named", "last name", highest, None
        yield "named", "no name", highest + 1, Rule.NAMED
    if bounds.finite:
        yield from (("finite", str(value), value, Rule.FINITE) for value in (math.nan, math.inf, -math.inf))
    if bounds.HasField("max_bytes"):
        yield "max_bytes", "max bytes", _text(field, bounds.max_bytes), None
        yield "max_bytes", "too many bytes", _text(field, bounds.max_bytes + 1), Rule.BYTES
        if field.type == FieldDescriptor.TYPE_STRING:
            letters = bounds.max_bytes // 2
            yield "max_bytes", "max letters", "é" * letters, None
            yield "max_bytes", "too many letters", "é" * letters + "xx", Rule.BYTES
    if bounds.min_bytes:
        yield "min_bytes", "min bytes", _text(field, bounds.min_bytes), None
        yield "min_bytes", "too few bytes", _text(field, bounds.min_bytes - 1), Rule.REQUIRED


def _distinct(field: FieldDescriptor, count: int) -> list[Any]:
    """Return so many elements; they differ where they are numbers."""
    if field.message_type is not None:
        return [with_field(field.message_type, ("",), put_nothing)] * count
    if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        return [_text(field, 1)] * count
    return list(range(1, count + 1))


def cases_of(frame: type[Message]) -> Iterator[Case]:
    for path, field in fields_below(cast("Descriptor", frame.DESCRIPTOR), ()):
        bounds, name = bounds_in(field.GetOptions()), field.name
        if bounds.required:
            yield Case("required", "absent", frame, path, _clear(name), Rule.REQUIRED)
        if not field.is_repeated:
            for kind, what, value, rule in _values(field):
                yield Case(kind, what, frame, path, put_value(name, value), rule)
            if field.has_presence and field.message_type is None:
                yield Case("min", "absent", frame, path, _clear(name))
            continue
        yield from _list_cases(frame, path, field)


def _list_cases(frame: type[Message], path: tuple[str, ...], field: FieldDescriptor) -> Iterator[Case]:
    bounds, name = bounds_in(field.GetOptions()), field.name
    few = min(_MANY, bounds.max_items - 1)
    for kind, what, value, rule in _values(field):
        for before in sorted({0, 1, few}):
            good = [element for element in _distinct(field, before) if not bounds.unique or element != value]
            element = f"[{len(good)}]" if rule else ""
            yield Case(kind, f"{what} after {before}", frame, path, _fill(name, [*good, value]), rule, element)
    for what, count, rule in (("full", bounds.max_items, None), ("too many", bounds.max_items + 1, Rule.ITEMS)):
        yield Case("max_items", what, frame, path, _fill_up(field, count), rule, is_long=count > _LONG)
    if bounds.unique:
        yield Case("unique", "twice", frame, path, _fill(name, [5, 6, 5]), Rule.UNIQUE, "[2]")
        many = [*_distinct(field, few), 5]
        yield Case("unique", "twice of many", frame, path, _fill(name, many), Rule.UNIQUE, f"[{few}]")


def fields_below(message: Descriptor, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], FieldDescriptor]]:
    for field in fields_of(message):
        yield (*path, field.name), field
        if field.message_type is not None:
            yield from fields_below(field.message_type, (*path, field.name))
