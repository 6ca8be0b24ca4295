"""Encodes and decodes control frames, and checks them against the schema's bounds."""

from typing import NamedTuple, TypeVar, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.frame_checks import Check, check_of
from tokenbus_contracts.generated.client_pb2 import ClientFrame, ServerFrame
from tokenbus_contracts.generated.request_pb2 import RequestEvent
from tokenbus_contracts.generated.stream_pb2 import ProcessorFrame, WorkerFrame
from tokenbus_contracts.malformed import explain, field_numbers
from tokenbus_contracts.schema import check_implementation, max_bytes_of, oneofs_of

FRAMES: tuple[type[Message], ...] = (WorkerFrame, ProcessorFrame, ClientFrame, ServerFrame, RequestEvent)
"""The message types that this module reads and writes."""

_MOST_PEEKED = 8
_Frame = TypeVar("_Frame", bound=Message)


class _Rules(NamedTuple):
    """The rules of one type of frame."""

    descriptor: Descriptor
    max_bytes: int
    check: Check
    body: str
    """The name of the oneof that holds the frame's body."""
    bodies: list[str]


def read_frame(frame: type[_Frame], data: bytes) -> _Frame:
    """Return the decoded frame, or raise the ContractError of the first broken bound.

    If the frame's body belongs to a newer minor version, the result has no body, and the caller should ignore it.
    """
    if frame is not ProcessorFrame:  # only workers read a ProcessorFrame, and workers trust their processor
        check_implementation()
    rules = _rules_of(frame)
    if type(data) is not bytes:
        raise ContractError("message", "bytes", type(data).__name__, rule=Rule.TYPE)
    if len(data) > rules.max_bytes:
        raise ContractError("message", rules.max_bytes, len(data), rule=Rule.BYTES)
    try:
        message = frame.FromString(data)
    except DecodeError:
        raise explain(data, rules.descriptor) from None
    try:
        rules.check(message)
    except ContractError as error:  # the body is checked last
        known = rules.descriptor.fields_by_number
        if error.field != rules.body or all(number in known for number in field_numbers(data)):
            raise
    return message


def body_of(frame: type[Message], data: bytes) -> str | None:
    """Return the name of a frame's body, such as "hello", or None if the body is not among the first fields."""
    fields, bodies = frame.DESCRIPTOR.fields_by_number, _rules_of(frame).bodies
    names = (fields[number].name for number in field_numbers(data, _MOST_PEEKED) if number in fields)
    return next((name for name in names if name in bodies), None)


def write_frame(message: Message) -> bytes:
    """Return the encoded frame. Equal frames have equal bytes.

    A ContractError names the first broken bound.
    """
    rules = _rules_of(type(message))
    rules.check(message)
    data = message.SerializeToString(deterministic=True)
    if len(data) > rules.max_bytes:
        raise ContractError("message", rules.max_bytes, len(data), rule=Rule.BYTES)
    return data


_RULES: dict[type[Message], _Rules] = {}
"""The rules of each frame type that this process has used. Preparing the rules of all types would delay the start."""


def _rules_of(frame: type[Message]) -> _Rules:
    if (known := _RULES.get(frame)) is not None:
        return known
    if frame not in FRAMES:
        raise ContractError("message", "a control frame", frame.__name__, rule=Rule.TYPE)
    descriptor = cast("Descriptor", frame.DESCRIPTOR)
    ((body, bodies),) = oneofs_of(descriptor).items()
    check = check_of(descriptor)
    if check is None:
        raise TypeError(f"{frame.__name__}: a frame has a body")
    rules = _RULES[frame] = _Rules(descriptor, max_bytes_of(descriptor), check, body, bodies)
    return rules
