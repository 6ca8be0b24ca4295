"""An AsyncAPI 3 document of the protocols, with channels, directions, and payloads as JSON Schema."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from google.protobuf.json_format import MessageToDict

from tokenbus_contracts.generated.logprob_batch_pb2 import LogprobBatch
from tokenbus_contracts.published.descriptors import FRAMES, Field, Message, Schema
from tokenbus_contracts.published.golden import golden_messages
from tokenbus_contracts.published.json_schema import definitions
from tokenbus_contracts.schema import MAJOR, MINOR

Document = dict[str, Any]
_CONTENT_TYPE = "application/x-protobuf"
_PARTS = {
    ("WorkerFrame", "item"): ["WorkerFrame", "LogprobBatch or RequestEvent, as item.payload_kind says"],
    ("ServerFrame", "outputs"): ["ServerFrame", "LogprobBatch (target)", "LogprobBatch (draft), if has_draft is set"],
    ("ServerFrame", "watched_item"): ["ServerFrame", "LogprobBatch or RequestEvent, as watched_item.payload_kind says"],
}
"""The parts of each transport message that has more parts than its frame."""
_EXAMPLES = ("one_row", "two_rows_with_alternatives", "draft", "finished_stop", "first_part")


class Channel(NamedTuple):
    """A channel from the point of view of its listener."""

    name: str
    listener: str
    setting: str
    """The name of the setting for the channel's address."""
    address: str
    received: str
    """The name of the frame that peers send to the listener."""
    sent: str
    """The name of the frame that the listener sends."""
    about: str


CHANNELS = (
    Channel(
        *("workers", "processor", "bus.workers_address", "tcp://127.0.0.1:5570", "WorkerFrame", "ProcessorFrame"),
        "Workers publish their streams here, and take requests.",
    ),
    Channel(
        *("clients", "processor", "bus.clients_address", "tcp://127.0.0.1:5571", "ClientFrame", "ServerFrame"),
        "Clients send requests here, and take their tokens.",
    ),
)


def asyncapi(schema: Schema) -> Document:
    """Return the AsyncAPI document, with golden messages as examples."""
    frames = [frame for channel in CHANNELS for frame in (channel.received, channel.sent)]
    payloads = ["LogprobBatch", "RequestEvent"]
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Tokenbus",
            "version": f"{MAJOR}.{MINOR}.0",
            "description": (
                "Every token that an LLM engine emits, from the worker to the client that asked for it. The document "
                "speaks for a processor. Peers connect a ZeroMQ DEALER to a ROUTER. A transport message has one or "
                "more parts; the first is a frame, each part is one protobuf message of package tokenbus.v1, and "
                "payloads are shown in protobuf's JSON form."
            ),
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": _CONTENT_TYPE,
        "servers": {
            channel.name: {
                "host": channel.address.removeprefix("tcp://"),
                "protocol": "zmtp",
                "description": f"The address is the setting {channel.setting}; ipc:// addresses work too.",
            }
            for channel in CHANNELS
        },
        "channels": {channel.name: _channel(schema, channel) for channel in CHANNELS},
        "operations": dict(operation for channel in CHANNELS for operation in _operations(schema, channel)),
        "components": {
            "messages": {
                **{key: message for frame in frames for key, message in _messages_of(schema, frame)},
                **{name: _payload(schema.messages[name]) for name in payloads},
            },
            "schemas": definitions(schema, [*frames, *payloads], "#/components/schemas/"),
        },
    }


def _bodies_of(schema: Schema, frame: str) -> list[Field]:
    (fields,) = schema.messages[frame].oneofs().values()
    return fields


def _channel(schema: Schema, channel: Channel) -> Document:
    keys = [key for frame in (channel.received, channel.sent) for key, _ in _messages_of(schema, frame)]
    return {
        "address": channel.address,
        "description": channel.about,
        "servers": [{"$ref": f"#/servers/{channel.name}"}],
        "messages": {key: {"$ref": f"#/components/messages/{key}"} for key in [*keys, "LogprobBatch", "RequestEvent"]},
    }


def _operations(schema: Schema, channel: Channel) -> Iterable[tuple[str, Document]]:
    for action, frame in (("receive", channel.received), ("send", channel.sent)):
        writers, readers = FRAMES[frame]
        yield (
            f"{action}{frame}",
            {
                "action": action,
                "channel": {"$ref": f"#/channels/{channel.name}"},
                "summary": f"What {writers} say to {readers}.",
                "messages": [
                    {"$ref": f"#/channels/{channel.name}/messages/{frame}.{field.proto.name}"}
                    for field in _bodies_of(schema, frame)
                ],
            },
        )


def _messages_of(schema: Schema, frame: str) -> Iterable[tuple[str, Document]]:
    for field in _bodies_of(schema, frame):
        name = field.proto.name
        payload = {"allOf": [{"$ref": f"#/components/schemas/{frame}"}, {"required": [field.proto.json_name]}]}
        titles = {"name": f"{frame}.{name}", "title": f"{name} in a {frame}", "summary": field.comment}
        parts = _PARTS.get((frame, name), [frame])
        yield f"{frame}.{name}", _message(schema.messages[frame], titles, payload) | {"x-parts": parts}


def _payload(message: Message) -> Document:
    titles = {"name": message.name, "title": message.name, "summary": message.comment}
    found = _message(message, titles, {"$ref": f"#/components/schemas/{message.name}"})
    return found | ({"examples": list(_examples())} if message.name == "LogprobBatch" else {})


def _message(message: Message, titles: Document, payload: Document) -> Document:
    return {
        **titles,
        "contentType": _CONTENT_TYPE,
        "payload": payload,
        "x-protobuf-message": f"tokenbus.v1.{message.name}",
        "x-max-bytes": message.bounds.max_bytes,
    }


def _examples() -> Iterator[Document]:
    for message in golden_messages():
        name = message.name.removeprefix("valid/")
        if name in _EXAMPLES:
            payload = MessageToDict(LogprobBatch.FromString(message.data))
            yield {"name": name, "summary": message.expected["shows"], "payload": payload}
