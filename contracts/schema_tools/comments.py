"""Checks that a field's comment says what a reader must know; the linter asks only that there be one."""

import re
from collections.abc import Iterator

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from schema_tools.compiled import Tree
from tokenbus_contracts.published.descriptors import comments_in, messages_in

# A closed list, so that "in order" is no unit; a field in a new unit adds it here.
_UNITS = (
    *("alternatives", "bytes", "characters", "elements", "frames", "items", "messages", "milliseconds"),
    *("nanoseconds", "nats", "parts", "requests", "rows", "steps", "tokens", "the field's own unit"),
)
_UNIT = rf"no unit|in (?:{'|'.join(_UNITS)})"
# Where a file's or a message's fields are filed among its comments: their numbers in the descriptor.
_FILE_EXTENSION, _MESSAGE_FIELD = 7, 2

_TEXT = (FieldDescriptorProto.TYPE_STRING, FieldDescriptorProto.TYPE_BYTES)


def comment_faults(tree: Tree) -> Iterator[str]:
    """Yield a line for each field whose comment leaves out its unit, what nothing means, or what is invalid."""
    for file in tree.compiled:
        comments = comments_in(file)
        for name, path, field in _fields(file):
            if missing := list(_missing(field, comments.get(path, ""))):
                yield f"{name}: its comment does not say {', '.join(missing)}"


def _fields(file: FileDescriptorProto) -> Iterator[tuple[str, tuple[int, ...], FieldDescriptorProto]]:
    yield from ((field.name, (_FILE_EXTENSION, place), field) for place, field in enumerate(file.extension))
    for name, path, message in messages_in(file):
        yield from (
            (f"{name}.{field.name}", (*path, _MESSAGE_FIELD, place), field) for place, field in enumerate(message.field)
        )


def _missing(field: FieldDescriptorProto, comment: str) -> Iterator[str]:
    if not _says(comment, _UNIT):
        yield 'its unit or "No unit"'
    yield from (f"what {' or '.join(words)} means" for words in _nothings(field) if not _says(comment, "|".join(words)))
    if not _says(comment, "invalid"):
        yield 'what is "invalid"'


def _nothings(field: FieldDescriptorProto) -> Iterator[tuple[str, ...]]:
    """Yield the words of which one must be there, for each way in which the field can hold nothing.

    They go by type, since "None is invalid" says nothing about zero.
    """
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        yield ("zero", "none", "empty")
        return
    if field.type == FieldDescriptorProto.TYPE_MESSAGE or field.HasField("oneof_index"):
        yield ("absent",)
    if field.type == FieldDescriptorProto.TYPE_BOOL:
        yield ("false",)
    elif field.type in _TEXT:
        yield ("empty",)
    elif field.type != FieldDescriptorProto.TYPE_MESSAGE:
        yield ("zero",)


def _says(comment: str, words: str) -> bool:
    return re.search(rf"\b(?:{words})\b", comment, re.IGNORECASE) is not None
