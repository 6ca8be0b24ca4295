"""Compares two versions of the schema, and names the peers that each difference breaks."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from google.protobuf.descriptor_pb2 import FieldDescriptorProto

from tokenbus_contracts.generated.bounds_pb2 import ColumnLength, FieldBounds, MessageBounds
from tokenbus_contracts.published.descriptors import FRAMES, Enum, Field, Message, Schema
from tokenbus_contracts.schema import status_rule_in

_Bounds = FieldBounds | MessageBounds
_TYPES = {number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()}
_LARGEST = ("max", "max_items", "max_bytes")
_SMALLEST = ("min", "least", "min_bytes")
_DEMANDS = ("finite", "unique", "named", "required", "length")
_DEFAULTS = {"default_max": "max", "default_max_items": "max_items", "default_max_bytes": "max_bytes"}
"""For each default bound, the bound that applies to deployments if the default is absent."""
_ALWAYS_THERE = {
    ColumnLength.COLUMN_LENGTH_ROWS,
    ColumnLength.COLUMN_LENGTH_TOKENS,
    ColumnLength.COLUMN_LENGTH_SCORED_TOKENS,
    ColumnLength.COLUMN_LENGTH_ALTERNATIVES,
    ColumnLength.COLUMN_LENGTH_PROPOSALS,
}
"""The values of the option `length` for columns that are not optional in a message with rows."""
_NUMBERS = (
    {
        FieldDescriptorProto.TYPE_BOOL: (0, 1),
        FieldDescriptorProto.TYPE_INT32: (-(2**31), 2**31 - 1),
        FieldDescriptorProto.TYPE_UINT32: (0, 2**32 - 1),
        FieldDescriptorProto.TYPE_INT64: (-(2**63), 2**63 - 1),
        FieldDescriptorProto.TYPE_UINT64: (0, 2**64 - 1),
    },
    {FieldDescriptorProto.TYPE_FIXED32: (0, 2**32 - 1), FieldDescriptorProto.TYPE_SFIXED32: (-(2**31), 2**31 - 1)},
    {FieldDescriptorProto.TYPE_FIXED64: (0, 2**64 - 1), FieldDescriptorProto.TYPE_SFIXED64: (-(2**63), 2**63 - 1)},
)
"""The number types with their ranges. Two types of a group have the same encoding of each number in both ranges."""


class Change(NamedTuple):
    """A difference between two versions of the schema."""

    subject: str
    """The name of the message, field or enum value."""
    breaks: bool
    """Whether the change breaks something between peers of the two versions."""
    sentence: str
    """A description of the difference and of the affected peers."""


class _Sides(NamedTuple):
    """The writers and the readers of a message."""

    writers: str
    readers: str

    def refusal(self, *, by_new: bool, without_limit: bool = False) -> str:
        """Return a phrase that names the refusing readers, and the writers whose messages the readers refuse."""
        refusing, writing = ("new", "old") if by_new else ("old", "new")
        readers = f"{self.readers} with the {refusing} schema" + " that set no limit of their own" * without_limit
        return f"{readers} refuse what {self.writers} with the {writing} one may send"


def changes(old: Schema, new: Schema) -> list[Change]:
    """Return the differences between two versions, sorted by subject, with breaking differences first."""
    found = [*_messages(old, new), *_enums(old, new)]
    return sorted(found, key=lambda change: (not change.breaks, change.subject))


def _messages(old: Schema, new: Schema) -> Iterator[Change]:
    for name in sorted(old.messages.keys() | new.messages.keys()):
        was, now = old.messages.get(name), new.messages.get(name)
        sides = _sides(name, old, new)
        if was is None or now is None:
            yield _gone_or_new("message", name, sides, is_gone=now is None)
            continue
        yield from _bounds(name, was.bounds, now.bounds, sides)
        yield from _fields(name, was, now, sides)


def _sides(name: str, *schemas: Schema) -> _Sides:
    """Return the writers and the readers of a top-level or nested message."""
    holders = [
        frame
        for frame in FRAMES
        if any(frame in schema.messages and name in schema.reached_from(frame) for schema in schemas)
    ]
    writers, readers = (_listed(FRAMES[frame][side] for frame in holders) for side in (0, 1))
    return _Sides(writers or "writers", readers or "readers")


def _listed(names: Iterable[str]) -> str:
    *others, last = dict.fromkeys(name for each in names for name in each.split(" and ")) or [""]
    return f"{', '.join(others)} and {last}" if others else last


def _gone_or_new(what: str, name: str, sides: _Sides, *, is_gone: bool) -> Change:
    if is_gone:
        text = (
            f"the {what} is gone: {sides.readers} with the new schema do not read what {sides.writers} with the old "
            "one say in it"
        )
        return Change(name, breaks=True, sentence=text)
    text = f"the {what} is new: {sides.readers} with the old schema ignore it"
    return Change(name, breaks=False, sentence=text)


def _fields(name: str, was: Message, now: Message, sides: _Sides) -> Iterator[Change]:
    before, after = ({field.proto.number: field for field in each.fields} for each in (was, now))
    for number in sorted(before.keys() | after.keys()):
        one, other = before.get(number), after.get(number)
        subject = f"{name}.{(before | after)[number].proto.name}" if one is None else f"{name}.{one.proto.name}"
        if one is None or other is None:
            yield _gone_or_new("field", subject, sides, is_gone=other is None)
            if one is None and any(span.start <= number < span.end for span in was.proto.reserved_range):
                text = (
                    f"the number {number} was reserved: {sides.readers} misread what older {sides.writers} say under it"
                )
                yield Change(subject, breaks=True, sentence=text)
            for field, how, by_new in ((one, "gone", False), (other, "new", True)):
                if field is not None and (field.must_be_set or field.bounds.length in _ALWAYS_THERE):
                    text = f"the field is {how} and must be set: {sides.refusal(by_new=by_new)}"
                    yield Change(subject, breaks=True, sentence=text)
        else:
            yield from _field(subject, one, other, sides)
            yield from _oneof(subject, (was, one), (now, other))


def _field(subject: str, was: Field, now: Field, sides: _Sides) -> Iterator[Change]:
    if (was.proto.name, was.proto.json_name) != (now.proto.name, now.proto.json_name):
        called = now.proto.name if was.proto.name != now.proto.name else f"{now.proto.json_name} in JSON"
        text = f"is called {called} now: the bytes are the same; JSON and code that name it break"
        yield Change(subject, breaks=True, sentence=text)
    before, after = _kind(was), _kind(now)
    if before != after:
        # A field's label and type determine its encoding, except the contents of a nested message.
        has_same_bytes = (was.is_repeated, was.proto.type) == (now.is_repeated, now.proto.type)
        is_alike = _are_read_alike(was, now)
        if is_alike:
            text = "every value that may be sent is read as it was"
        elif has_same_bytes:
            text = "the bytes are the same; code that uses it breaks"
        else:
            text = f"{sides.readers} misread or refuse what {sides.writers} of the other version send"
        yield Change(subject, breaks=not is_alike, sentence=f"is {after} instead of {before}: {text}")
        if not is_alike and not has_same_bytes:
            return
    yield from _bounds(subject, was.bounds, now.bounds, sides)


def _are_read_alike(was: Field, now: Field) -> bool:
    """Return whether all values within the bounds of both versions have the same encoding in both types."""
    one, other = was.proto.type, now.proto.type
    is_same_form = was.is_repeated == now.is_repeated and was.proto.proto3_optional == now.proto.proto3_optional
    if not is_same_form or not any(one in kind and other in kind for kind in _NUMBERS):
        return False
    ranges = {**_NUMBERS[0], **_NUMBERS[1], **_NUMBERS[2]}
    least, most = max(ranges[one][0], ranges[other][0]), min(ranges[one][1], ranges[other][1])
    for field in (was, now):
        lower, upper = ranges[field.proto.type]
        bounds = [_value(field.bounds, name) for name in ("min", "least", "max")]
        lower = max([lower, *(bound for bound in bounds[:2] if bound is not None)])
        upper = min([upper, *(bound for bound in bounds[2:] if bound is not None)])
        if lower < least or upper > most:
            return False
    return True


def _kind(field: Field) -> str:
    kind = field.type_name or _TYPES[field.proto.type]
    return ("repeated " if field.is_repeated else "optional " if field.proto.proto3_optional else "") + kind


def _oneof(subject: str, was: tuple[Message, Field], now: tuple[Message, Field]) -> Iterator[Change]:
    before, after = (_oneof_of(*each) for each in (was, now))
    if bool(before) != bool(after):
        text = (
            f"is in {f'the oneof {after}' if after else 'no oneof'} instead of {before or 'none'}: writers of one "
            "version may set it together with other members of the oneof, of which readers of the other keep the last"
        )
        yield Change(subject, breaks=True, sentence=text)


def _oneof_of(message: Message, field: Field) -> str:
    return next((name for name, fields in message.oneofs().items() if field in fields), "")


def _bounds(subject: str, was: _Bounds, now: _Bounds, sides: _Sides) -> Iterator[Change]:
    for bound in (*_LARGEST, *_SMALLEST):
        before, after = _value(was, bound), _value(now, bound)
        if before != after:
            yield _moved(subject, bound, before, after, sides, is_upper=bound in _LARGEST)
    for demand in _DEMANDS:
        before, after = _value(was, demand), _value(now, demand)
        if before != after:
            how = "demanded no longer" if not after else "another one is demanded" if before else "demanded now"
            text = f"{demand}: {how}: {sides.refusal(by_new=bool(after))}"
            yield Change(subject, breaks=True, sentence=text)
    for default, bound in _DEFAULTS.items():
        # If a default is absent, the bound without `default_` applies.
        before, after = (_value(each, default) or _value(each, bound) for each in (was, now))
        if _value(was, bound) == _value(now, bound) and before != after:
            yield _moved(subject, default, before, after, sides, is_upper=True)


def _value(bounds: _Bounds, name: str) -> int | None:
    """Return a bound's value, or None if the bound is absent or does not exist for this kind of element."""
    return next((int(value) for field, value in bounds.ListFields() if field.name == name), None)


def _moved(subject: str, bound: str, before: Any, after: Any, sides: _Sides, *, is_upper: bool) -> Change:  # noqa: ANN401, PLR0913
    """Return the change of a bound that became narrower or wider. None means that there is no bound."""
    is_narrower = after is not None and (before is None or (after < before if is_upper else after > before))
    text = (
        f"{bound}: {_shown(after)} instead of {_shown(before)}: "
        f"{sides.refusal(by_new=is_narrower, without_limit=bound in _DEFAULTS)} "
        f"{'above' if is_upper else 'below'} {_shown(after if is_narrower else before)}"
    )
    return Change(subject, breaks=True, sentence=text)


def _shown(value: Any) -> str:  # noqa: ANN401
    return "none" if value is None else f"{value:,}"


def _enums(old: Schema, new: Schema) -> Iterator[Change]:
    for name in sorted(old.enums.keys() | new.enums.keys()):
        was, now = old.enums.get(name), new.enums.get(name)
        sides = _sides(name, old, new)
        if was is None or now is None:
            yield _gone_or_new("enum", name, sides, is_gone=now is None)
        else:
            yield from _values(name, was, now, sides, is_closed=_is_closed(name, old))


def _is_closed(name: str, schema: Schema) -> bool:
    """Return whether a field refuses enum values that the schema does not name."""
    fields = (field for message in schema.messages.values() for field in message.fields)
    return any(field.type_name == name and field.bounds.named for field in fields)


def _values(name: str, was: Enum, now: Enum, sides: _Sides, *, is_closed: bool) -> Iterator[Change]:
    before, after = ({value.number: value for value, _ in reversed(each.values)} for each in (was, now))
    for number in sorted(before.keys() | after.keys()):
        one, other = before.get(number), after.get(number)
        if other is None:
            text = f"the value {number} is gone: {sides.readers} with the new schema refuse or misread it"
            yield Change(f"{name}.{before[number].name}", breaks=True, sentence=text)
        elif one is None:
            reading = "refuse it" if is_closed else "take it for a value that they do not know"
            text = f"the value {number} is new: {sides.readers} with the old schema {reading}"
            yield Change(f"{name}.{other.name}", breaks=is_closed, sentence=text)
        elif one.name != other.name:
            text = f"the value {number} is called {other.name} now: the bytes are the same; JSON and code break"
            yield Change(f"{name}.{one.name}", breaks=True, sentence=text)
        elif status_rule_in(one.options) != status_rule_in(other.options):
            text = (
                f"rows of this status may carry other things than before: {sides.readers} refuse some that are sent by "
                f"{sides.writers} of the other version"
            )
            yield Change(f"{name}.{one.name}", breaks=True, sentence=text)
