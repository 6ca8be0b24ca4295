"""Schema: messages, fields and enums of a set of descriptors, by name, with their comments and bounds."""

from collections.abc import Iterator, Sequence
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
"""Field numbers in descriptor.proto. In the path of a comment, such numbers alternate with list indexes."""
_OURS = "tokenbus.v1."
FRAMES = {
    "WorkerFrame": ("workers", "processors"),
    "ProcessorFrame": ("processors", "workers"),
    "ClientFrame": ("clients", "processors"),
    "ServerFrame": ("processors", "clients"),
    "LogprobBatch": ("workers", "processors and clients"),
    "RequestEvent": ("workers", "processors"),
}
"""The message types that form parts of a transport message, with their writers and readers."""


class Field(NamedTuple):
    """A field of a message."""

    proto: FieldDescriptorProto
    comment: str

    @property
    def bounds(self) -> bounds_pb2.FieldBounds:
        return bounds_in(self.proto.options)

    @property
    def is_repeated(self) -> bool:
        return self.proto.label == FieldDescriptorProto.LABEL_REPEATED

    @property
    def must_be_set(self) -> bool:
        """Whether a message without the field is invalid, because it is required or its zero value is invalid."""
        bounds, proto = self.bounds, self.proto
        may_be_absent = self.is_repeated or proto.proto3_optional or proto.HasField("oneof_index")
        return bounds.required or (not may_be_absent and bool(bounds.min or bounds.min_bytes or bounds.least > 0))

    @property
    def type_name(self) -> str:
        """The name of the field's message or enum type, without the package."""
        return self.proto.type_name.removeprefix(f".{_OURS}")


class Message(NamedTuple):
    """A message type with its fields in the order of their numbers."""

    name: str
    proto: DescriptorProto
    comment: str
    fields: list[Field]

    @property
    def bounds(self) -> bounds_pb2.MessageBounds:
        return message_bounds_in(self.proto.options)

    def oneofs(self) -> dict[str, list[Field]]:
        """Return the fields of each oneof, without the oneofs that protoc creates for optional fields."""
        found: dict[str, list[Field]] = {}
        for field in self.fields:
            if field.proto.HasField("oneof_index") and not field.proto.proto3_optional:
                found.setdefault(self.proto.oneof_decl[field.proto.oneof_index].name, []).append(field)
        return found


class Enum(NamedTuple):
    """An enum type."""

    name: str
    comment: str
    values: list[tuple[EnumValueDescriptorProto, str]]
    """The values of the enum with their comments."""


class Schema:
    """A version of the schema."""

    def __init__(self, files: FileDescriptorSet) -> None:
        self._files = [file for file in files.file if f"{file.package}." == _OURS]
        self._all = [each for file in self._files for each in _declared(file)]

    @classmethod
    def installed(cls) -> "Schema":
        """Return the installed version of the schema."""
        return cls(FileDescriptorSet.FromString((PACKAGE / "generated" / "schema.binpb").read_bytes()))

    def descriptor_set(self) -> FileDescriptorSet:
        """Return the descriptors, including protobuf's own descriptor.proto, which they import."""
        imported = FileDescriptorProto.FromString(descriptor_pb2.DESCRIPTOR.serialized_pb)
        return FileDescriptorSet(file=[imported, *self._files])

    @cached_property
    def messages(self) -> dict[str, Message]:
        """Every message type by its name without the package. The name of a nested type is Outer.Inner."""
        return {each.name: each for each in self._all if isinstance(each, Message)}

    @cached_property
    def enums(self) -> dict[str, Enum]:
        """Every enum type by its name without the package. The name of a nested type is Outer.Inner."""
        return {each.name: each for each in self._all if isinstance(each, Enum)}

    def reached_from(self, name: str) -> set[str]:
        """Return the names of a message type and of all messages and enums that its fields reach."""
        found, waiting = set[str](), [name]
        while waiting:
            each = waiting.pop()
            if each not in found:
                found.add(each)
                message = self.messages.get(each)
                waiting += [field.type_name for field in message.fields if field.type_name] if message else []
        return found


def proto_files() -> dict[str, str]:
    """Return the text of each .proto file of the schema by its import path."""
    folder = next(each for each in (PACKAGE / "proto", PACKAGE.parents[1] / "proto") if each.is_dir())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*.proto"))}


def _declared(file: FileDescriptorProto) -> Iterator[Message | Enum]:
    """Yield the messages and enums of a file with their comments. The name of a nested type is Outer.Inner."""
    found = {tuple(place.path): " ".join(place.leading_comments.split()) for place in file.source_code_info.location}

    def comment(*path: int) -> str:
        return found.get(path, "")

    def enums(protos: Sequence[EnumDescriptorProto], prefix: str, *path: int) -> Iterator[Enum]:
        for place, proto in enumerate(protos):
            values = [(value, comment(*path, place, _VALUES, index)) for index, value in enumerate(proto.value)]
            yield Enum(f"{prefix}{proto.name}", comment(*path, place), values)

    yield from enums(file.enum_type, "", _ENUMS)
    waiting: list[tuple[str, tuple[int, ...], DescriptorProto]] = [
        (each.name, (_MESSAGES, place), each) for place, each in enumerate(file.message_type)
    ]
    while waiting:
        name, path, proto = waiting.pop(0)
        fields = [Field(field, comment(*path, _FIELDS, place)) for place, field in enumerate(proto.field)]
        yield Message(name, proto, comment(*path), sorted(fields, key=lambda field: field.proto.number))
        yield from enums(proto.enum_type, f"{name}.", *path, _NESTED_ENUMS)
        for place, each in enumerate(proto.nested_type):
            waiting.append((f"{name}.{each.name}", (*path, _NESTED, place), each))
