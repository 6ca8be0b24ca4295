"""The AsyncAPI document: complete and consistent."""

from collections.abc import Iterator
from typing import Any

from jsonschema import Draft202012Validator

from tests.pages import ROOT
from tokenbus_contracts.published.asyncapi import asyncapi
from tokenbus_contracts.published.descriptors import FRAMES, Schema, proto_files

SCHEMA = Schema.installed()
DOCUMENT = asyncapi(SCHEMA)


def resolved(reference: str) -> Any:  # noqa: ANN401 - whatever is there
    found: Any = DOCUMENT
    for name in reference.removeprefix("#/").split("/"):
        found = found[name]
    return found


def references(of: object) -> Iterator[str]:
    for name, value in of.items() if isinstance(of, dict) else enumerate(of) if isinstance(of, list) else ():
        if name == "$ref":
            yield value
        else:
            yield from references(value)


def test_every_reference_leads_somewhere() -> None:
    found = set(references(DOCUMENT))
    assert len(found) > 60
    assert all(resolved(reference) for reference in found)


def test_every_frame_is_received_or_sent_once() -> None:
    """Each thing that a frame can say is a message of exactly one operation, with the bytes that the schema allows."""
    said = [
        each["$ref"].rpartition("/")[2]
        for operation in DOCUMENT["operations"].values()
        for each in operation["messages"]
    ]
    frames = [name for name in FRAMES if name.endswith("Frame")]
    bodies = [
        f"{frame}.{field.proto.name}"
        for frame in frames
        for (fields,) in [SCHEMA.messages[frame].oneofs().values()]
        for field in fields
    ]
    assert sorted(said) == sorted(bodies)
    for name in bodies:
        frame = name.partition(".")[0]
        assert DOCUMENT["components"]["messages"][name]["x-max-bytes"] == SCHEMA.messages[frame].bounds.max_bytes


def test_examples_are_valid() -> None:
    examples = DOCUMENT["components"]["messages"]["LogprobBatch"]["examples"]
    assert len(examples) == 5
    schemas = {"$defs": DOCUMENT["components"]["schemas"], "components": DOCUMENT["components"]}
    validator = Draft202012Validator(schemas | {"$ref": "#/components/schemas/LogprobBatch"})
    for example in examples:
        assert validator.is_valid(example["payload"]), example["name"]


def test_proto_files_are_those_of_the_folder() -> None:
    assert proto_files() == {
        path.relative_to(ROOT / "proto").as_posix(): path.read_text() for path in (ROOT / "proto").rglob("*.proto")
    }
