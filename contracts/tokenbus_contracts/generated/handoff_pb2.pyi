# Generated from proto/tokenbus/v1 by `make proto`. Do not edit: CI refuses a stale or edited copy.
from tokenbus_contracts.generated import bounds_pb2 as _bounds_pb2
from tokenbus_contracts.generated import request_pb2 as _request_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillFrame(_message.Message):
    __slots__ = ("handoff",)
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    handoff: Handoff
    def __init__(self, handoff: _Optional[_Union[Handoff, _Mapping]] = ...) -> None: ...

class DecodeFrame(_message.Message):
    __slots__ = ("reply",)
    REPLY_FIELD_NUMBER: _ClassVar[int]
    reply: HandoffReply
    def __init__(self, reply: _Optional[_Union[HandoffReply, _Mapping]] = ...) -> None: ...

class Handoff(_message.Message):
    __slots__ = ("schema_major", "ticket", "worker_id", "generate", "state_bytes", "state_crc32", "number")
    SCHEMA_MAJOR_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_CRC32_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    schema_major: int
    ticket: bytes
    worker_id: str
    generate: _request_pb2.Generate
    state_bytes: int
    state_crc32: int
    number: int
    def __init__(self, schema_major: _Optional[int] = ..., ticket: _Optional[bytes] = ..., worker_id: _Optional[str] = ..., generate: _Optional[_Union[_request_pb2.Generate, _Mapping]] = ..., state_bytes: _Optional[int] = ..., state_crc32: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class HandoffReply(_message.Message):
    __slots__ = ("request_key", "refusal", "number")
    REQUEST_KEY_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    request_key: int
    refusal: str
    number: int
    def __init__(self, request_key: _Optional[int] = ..., refusal: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...
