"""Schema: the messages, fields and enums of a set of descriptors, by name, with their comments and bounds."""

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    EnumValueDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from tokenbus_contracts.generated import bounds_pb2
from tokenbus_contracts.schema import bounds_in, message_bounds_in

PACKAGE = Path(__file__).parents[1]
_MESSAGES, _ENUMS, _FIELDS, _NESTED, _NESTED_ENUMS, _VALUES = 4, 5, 2, 3, 4, 2
"""Where comments are filed: the numbers of these lists in the descriptors."""
_OURS = "tokenbus.v1."
FRAMES = {
    "WorkerFrame": ("workers", "processors"),
    "ProcessorFrame": ("processors", "workers"),
    "ClientFrame": ("clients", "processors"),
    "ServerFrame": ("processors", "clients"),
    "LogprobBatch": ("workers", "processors and clients"),
    "RequestEvent": ("workers", "processors"),
}
"""What is sent as one part of a transport message: who writes it, and who reads it."""


class Field(NamedTuple):
    """A field of a message."""

    proto: FieldDescriptorProto
    comment: str

    @property
    def bounds(self) -> bounds_pb2.FieldBounds:
        """What its options declare."""
        return bounds_in(self.proto.options)

    @property
    def is_repeated(self) -> bool:
        """Whether it holds any number of values."""
        return self.proto.label == FieldDescriptorProto.LABEL_REPEATED

    @property
    def must_be_set(self) -> bool:
        """Whether a message without it is invalid: it is required, or its zero, which is left out, is refused."""
        bounds, proto = self.bounds, self.proto
        may_be_absent = self.is_repeated or proto.proto3_optional or proto.HasField("oneof_index")
        return bounds.required or (not may_be_absent and bool(bounds.min or bounds.min_bytes or bounds.least > 0))

    @property
    def type_name(self) -> str:
        """The message or enum that it holds, without the package."""
        return self.proto.type_name.removeprefix(f".{_OURS}")


class Message(NamedTuple):
    """A message, with its fields in the order of their numbers."""

    name: str
    proto: DescriptorProto
    comment: str
    fields: list[Field]

    @property
    def bounds(self) -> bounds_pb2.MessageBounds:
        """What its options declare."""
        return message_bounds_in(self.proto.options)

    def oneofs(self) -> dict[str, list[Field]]:
        """Return the fields of each oneof in the schema, without the oneofs that protoc makes for optional fields."""
        found: dict[str, list[Field]] = {}
        for field in self.fields:
            if field.proto.HasField("oneof_index") and not field.proto.proto3_optional:
                found.setdefault(self.proto.oneof_decl[field.proto.oneof_index].name, []).append(field)
        return found


class Enum(NamedTuple):
    """An enum."""

    name: str
    comment: str
    values: list[tuple[EnumValueDescriptorProto, str]]
    """Each with its comment."""


class Schema:
    """A version of the schema."""

    def __init__(self, files: FileDescriptorSet) -> None:
        """Take the descriptors; those of other packages, as protobuf's own, are left out."""
        self._files = [file for file in files.file if f"{file.package}." == _OURS]

    @classmethod
    def installed(cls) -> "Schema":
        """Return the schema of this version."""
        return cls(FileDescriptorSet.FromString((PACKAGE / "generated" / "schema.binpb").read_bytes()))

    def descriptor_set(self) -> FileDescriptorSet:
        """Return the descriptors with the file of protobuf's own that they import, as tools want them."""
        imported = FileDescriptorProto.FromString(descriptor_pb2.DESCRIPTOR.serialized_pb)
        return FileDescriptorSet(file=[imported, *self._files])

    @cached_property
    def messages(self) -> dict[str, Message]:
        """Every message by its name without the package; a nested one as Outer.Inner."""
        return {message.name: message for file in self._files for message in _described_messages(file)}

    @cached_property
    def enums(self) -> dict[str, Enum]:
        """Every enum, likewise."""
        return {enum.name: enum for file in self._files for enum in _enums_in(file)}

    def reached_from(self, name: str) -> set[str]:
        """Return the names of a message and of all that it holds, enums too."""
        found, waiting = set[str](), [name]
        while waiting:
            each = waiting.pop()
            if each not in found:
                found.add(each)
                message = self.messages.get(each)
                waiting += [field.type_name for field in message.fields if field.type_name] if message else []
        return found


def proto_files() -> dict[str, str]:
    """Return the text of each .proto file of the schema, by the path that others import it by."""
    folder = next(each for each in (PACKAGE / "proto", PACKAGE.parents[1] / "proto") if each.is_dir())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*.proto"))}


def comments_in(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    """Return the comment above each thing in a file, in one line, by the thing's path."""
    return {
        tuple(location.path): " ".join(location.leading_comments.split()) for location in file.source_code_info.location
    }


def messages_in(file: FileDescriptorProto) -> Iterator[tuple[str, tuple[int, ...], DescriptorProto]]:
    """Yield each message's name, its path among the comments, and itself; nested ones too, as Outer.Inner."""
    waiting: list[tuple[str, tuple[int, ...], DescriptorProto]] = [
        (each.name, (_MESSAGES, place), each) for place, each in enumerate(file.message_type)
    ]
    while waiting:
        name, path, proto = waiting.pop(0)
        yield name, path, proto
        waiting += [
            (f"{name}.{inner.name}", (*path, _NESTED, place), inner) for place, inner in enumerate(proto.nested_type)
        ]


def _described_messages(file: FileDescriptorProto) -> Iterator[Message]:
    comments = comments_in(file)
    for name, path, proto in messages_in(file):
        fields = [Field(field, comments.get((*path, _FIELDS, place), "")) for place, field in enumerate(proto.field)]
        fields.sort(key=lambda field: field.proto.number)
        yield Message(name, proto, comments.get(path, ""), fields)


def _enums_in(file: FileDescriptorProto) -> Iterator[Enum]:
    comments = comments_in(file)
    yield from _enums(file.enum_type, (_ENUMS,), "", comments)
    for name, path, proto in messages_in(file):
        yield from _enums(proto.enum_type, (*path, _NESTED_ENUMS), f"{name}.", comments)


def _enums(
    protos: Iterable[EnumDescriptorProto], path: tuple[int, ...], prefix: str, comments: dict[tuple[int, ...], str]
) -> Iterator[Enum]:
    for place, proto in enumerate(protos):
        values = [
            (value, comments.get((*path, place, _VALUES, number), "")) for number, value in enumerate(proto.value)
        ]
        yield Enum(f"{prefix}{proto.name}", comments.get((*path, place), ""), values)
