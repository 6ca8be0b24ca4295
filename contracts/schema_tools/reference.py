"""docs/contract-reference.md: every message, field, number, type, bound and enum value, from the schema itself."""

import re
from collections.abc import Iterator, Sequence

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

from schema_tools.compiled import comments_in, compiled, messages_in
from schema_tools.paths import Tree
from tokenbus_contracts.generated.bounds_pb2 import ColumnLength, FieldBounds, TokenRule
from tokenbus_contracts.schema import bounds_in, message_bounds_in, status_rule_in

_INTRODUCTION = """\
# The contract, field by field

Written by `make proto` from the schema; `make check` holds it equal. [contract.md](contract.md) has the rules that join
the fields; the files are in [proto/tokenbus/v1](../proto/tokenbus/v1). Numbers, types and bounds hold for the whole of
major version 1. "By default" is what a deployment enforces unless its [limits](settings.md#limits) say otherwise.

The bounds of a repeated field's value are each element's. "finite" means no NaN and no infinity, "unique" no two equal
elements, "named" no value that the enum does not name, "required" that it may not be absent.
"""
# The data first, then what carries it; a file that is not named here comes after those.
_ORDER = ("logprob_batch", "stream", "request", "client", "handoff", "bounds")
# Where things are filed among a file's comments: their numbers in the descriptors.
_SYNTAX, _FILE_ENUM, _FILE_EXTENSION, _ENUM_VALUE = (12,), 5, 7, 2
_MESSAGE_FIELD, _MESSAGE_ENUM, _MESSAGE_ONEOF = 2, 4, 8
_COLUMNS = {
    ColumnLength.COLUMN_LENGTH_ROWS: "one for each row",
    ColumnLength.COLUMN_LENGTH_TOKENS: "one for each token",
    ColumnLength.COLUMN_LENGTH_SCORED_TOKENS: "one for each scored token",
    ColumnLength.COLUMN_LENGTH_ALTERNATIVES: "one for each alternative",
    ColumnLength.COLUMN_LENGTH_PROPOSALS: "one for each proposal",
    ColumnLength.COLUMN_LENGTH_STOPPED_ROWS: "one for each row that is FINISHED_STOP, or none",
}
_TOKENS = {
    TokenRule.TOKEN_RULE_NONE: "no token",
    TokenRule.TOKEN_RULE_ANY: "any number of tokens",
    TokenRule.TOKEN_RULE_SOME: "at least 1 token",
}
Comments = dict[tuple[int, ...], str]


def reference(tree: Tree) -> str:
    """Return the page."""
    files = sorted(compiled(tree, comments=True), key=_place)
    return "\n".join([_INTRODUCTION, *(line for file in files for line in _file(file))])


def write_reference(tree: Tree) -> list[str]:
    """Write the page, and return its name if it changed."""
    if not is_stale(tree):
        return []
    tree.reference.parent.mkdir(parents=True, exist_ok=True)
    tree.reference.write_bytes(reference(tree).encode())
    return [str(tree.reference.relative_to(tree.root))]


def is_stale(tree: Tree) -> bool:
    """Tell whether the page is missing, or is not what the schema gives now."""
    return not tree.reference.is_file() or tree.reference.read_bytes() != reference(tree).encode()


def _place(file: FileDescriptorProto) -> tuple[int, str]:
    name = _stem(file)
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)


def _stem(file: FileDescriptorProto) -> str:
    return file.name.rpartition("/")[2].removesuffix(".proto")


def _file(file: FileDescriptorProto) -> Iterator[str]:
    comments = comments_in(file)
    yield f"## {_stem(file)}.proto"
    yield ""
    yield comments[_SYNTAX]
    yield ""
    if file.extension:
        fields = [((_FILE_EXTENSION, place), field) for place, field in enumerate(file.extension)]
        yield "The options that the schema adds to protobuf's own:"
        yield ""
        yield from _fields(fields, {}, comments)
    for name, path, message in messages_in(file):
        yield from _message(name, path, message, comments)
    for place, enum in enumerate(file.enum_type):
        yield from _enum(enum.name, (_FILE_ENUM, place), enum, comments)


def _message(name: str, path: tuple[int, ...], message: DescriptorProto, comments: Comments) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    yield comments.get(path, "")
    bounds = message_bounds_in(message.options)
    if bounds.max_bytes:
        default = f", {bounds.default_max_bytes} by default" if bounds.default_max_bytes else ""
        yield f"Encoded at most {bounds.max_bytes} bytes{default}."
    yield ""
    oneofs = {place: each.name for place, each in enumerate(message.oneof_decl) if not each.name.startswith("_")}
    for place, oneof in oneofs.items():
        yield f"Of `{oneof}` one field is set. {comments[*path, _MESSAGE_ONEOF, place]}"
        yield ""
    fields = [((*path, _MESSAGE_FIELD, place), field) for place, field in enumerate(message.field)]
    yield from _fields(fields, oneofs, comments)
    for place, enum in enumerate(message.enum_type):
        yield from _enum(f"{name}.{enum.name}", (*path, _MESSAGE_ENUM, place), enum, comments)


def _fields(
    fields: Sequence[tuple[tuple[int, ...], FieldDescriptorProto]], oneofs: dict[int, str], comments: Comments
) -> Iterator[str]:
    if not fields:
        return
    yield "| number | field | type | bounds | meaning |"
    yield "|---|---|---|---|---|"
    for path, field in fields:
        bounds = "; ".join(_bounds(bounds_in(field.options)))
        oneof = oneofs.get(field.oneof_index) if field.HasField("oneof_index") else None
        kind = _type(field) + (f", in `{oneof}`" if oneof else "")
        yield f"| {field.number} | `{field.name}` | {kind} | {bounds} | {_cell(comments.get(path, ''))} |"
    yield ""


def _type(field: FieldDescriptorProto) -> str:
    if field.type_name:
        name = re.sub(r"^\.tokenbus\.v1\.", "", field.type_name)
        kind = f"[{name}](#{name.lower().replace('.', '')})"
    else:
        kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {kind}"
    return f"optional {kind}" if field.proto3_optional else kind


def _bounds(bounds: FieldBounds) -> Iterator[str]:
    if bounds.required:
        yield "required"
    yield from _values(bounds)
    if bounds.max_bytes:
        yield f"{bounds.min_bytes} to {bounds.max_bytes} bytes"
    if bounds.max_items:
        default = f", {bounds.default_max_items} by default" if bounds.default_max_items else ""
        yield f"at most {bounds.max_items} elements{default}"
    if bounds.length:
        yield _COLUMNS[bounds.length]
    yield from (word for word in ("finite", "unique", "named") if getattr(bounds, word))


def _values(bounds: FieldBounds) -> Iterator[str]:
    default = f", {bounds.default_max} by default" if bounds.HasField("default_max") else ""
    least = bounds.least if bounds.HasField("least") else bounds.min if bounds.HasField("min") else None
    if least is not None and bounds.HasField("max"):
        yield f"{least} to {bounds.max}{default}"
    elif least is not None:
        yield f"at least {least}"
    elif bounds.HasField("max"):
        yield f"at most {bounds.max}{default}"


def _enum(name: str, path: tuple[int, ...], enum: EnumDescriptorProto, comments: Comments) -> Iterator[str]:
    has_rules = any(status_rule_in(value.options).tokens for value in enum.value)
    yield f"### {name}"
    yield ""
    yield comments.get(path, "")
    yield ""
    yield "| number | value | meaning |" + (" its row has |" if has_rules else "")
    yield "|---|---|---|" + ("---|" if has_rules else "")
    for place, value in enumerate(enum.value):
        rule = status_rule_in(value.options)
        carries = _TOKENS.get(rule.tokens, "") + (", may have proposals" if rule.proposals else "")
        meaning = _cell(comments[*path, _ENUM_VALUE, place])
        yield f"| {value.number} | `{value.name}` | {meaning} |" + (f" {carries} |" if has_rules else "")
    yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
