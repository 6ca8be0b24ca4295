"""The page of the protocols, from the AsyncAPI document: `python -m schema_tools.protocol > docs/protocol.md`."""

import sys
from collections.abc import Iterator
from typing import Any

from schema_tools.api import first_sentence
from tokenbus_contracts.published.asyncapi import asyncapi
from tokenbus_contracts.published.descriptors import Schema

_HEAD = """\
<!-- Generated from the schema by `python -m schema_tools.protocol > docs/protocol.md`. Do not edit. -->

# The protocols

Who says what to whom. `tokenbus schema asyncapi` prints the same as an AsyncAPI 3 document, with every field, its
bounds and examples, for tools that read such documents. A peer's first frame is its hello. [The contract](contract.md)
has the batch, and [the .proto files](../proto/tokenbus/v1) have the fields.

A transport message has one or more parts, each one protobuf message of package `tokenbus.v1`. The first is a frame.
"""


def page() -> str:
    """Return the page."""
    document = asyncapi(Schema.installed())
    lines = [_HEAD]
    for name, channel in document["channels"].items():
        lines += [f"## {name}", "", f"{channel['description']} By default at `{channel['address']}`.", ""]
        for operation in document["operations"].values():
            if operation["channel"]["$ref"] == f"#/channels/{name}":
                lines += _operation(document, operation)
    return "\n".join(lines).rstrip() + "\n"


def _operation(document: dict[str, Any], operation: dict[str, Any]) -> Iterator[str]:
    messages = [document["components"]["messages"][each["$ref"].rpartition("/")[2]] for each in operation["messages"]]
    most = messages[0]["x-max-bytes"]
    yield from (f"{operation['summary']} A `{messages[0]['name'].partition('.')[0]}` has at most {most:,} bytes.", "")
    yield from ("| body | what it says | parts behind the frame |", "|---|---|---|")
    for message in messages:
        about = first_sentence(message["summary"])
        yield f"| `{message['name'].partition('.')[2]}` | {about} | {'; '.join(message['x-parts'][1:])} |"
    yield ""


if __name__ == "__main__":
    sys.stdout.write(page())
