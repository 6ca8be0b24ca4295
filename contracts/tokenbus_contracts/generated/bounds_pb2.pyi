# Generated from proto/tokenbus/v1 by `make proto`. Do not edit: CI refuses a stale or edited copy.
from google.protobuf import descriptor_pb2 as _descriptor_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ColumnLength(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COLUMN_LENGTH_UNSPECIFIED: _ClassVar[ColumnLength]
    COLUMN_LENGTH_ROWS: _ClassVar[ColumnLength]
    COLUMN_LENGTH_TOKENS: _ClassVar[ColumnLength]
    COLUMN_LENGTH_SCORED_TOKENS: _ClassVar[ColumnLength]
    COLUMN_LENGTH_ALTERNATIVES: _ClassVar[ColumnLength]
    COLUMN_LENGTH_PROPOSALS: _ClassVar[ColumnLength]
    COLUMN_LENGTH_STOPPED_ROWS: _ClassVar[ColumnLength]
    COLUMN_LENGTH_ROWS_OR_NONE: _ClassVar[ColumnLength]
    COLUMN_LENGTH_OTHER_LOGPROBS: _ClassVar[ColumnLength]
    COLUMN_LENGTH_ENTROPIES: _ClassVar[ColumnLength]
    COLUMN_LENGTH_GIVEN_TOKENS: _ClassVar[ColumnLength]
    COLUMN_LENGTH_GIVEN_LOGPROBS: _ClassVar[ColumnLength]
    COLUMN_LENGTH_MASKED_TOKENS: _ClassVar[ColumnLength]
    COLUMN_LENGTH_MASK_TOKENS: _ClassVar[ColumnLength]

class TokenRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKEN_RULE_UNSPECIFIED: _ClassVar[TokenRule]
    TOKEN_RULE_NONE: _ClassVar[TokenRule]
    TOKEN_RULE_ANY: _ClassVar[TokenRule]
    TOKEN_RULE_SOME: _ClassVar[TokenRule]
COLUMN_LENGTH_UNSPECIFIED: ColumnLength
COLUMN_LENGTH_ROWS: ColumnLength
COLUMN_LENGTH_TOKENS: ColumnLength
COLUMN_LENGTH_SCORED_TOKENS: ColumnLength
COLUMN_LENGTH_ALTERNATIVES: ColumnLength
COLUMN_LENGTH_PROPOSALS: ColumnLength
COLUMN_LENGTH_STOPPED_ROWS: ColumnLength
COLUMN_LENGTH_ROWS_OR_NONE: ColumnLength
COLUMN_LENGTH_OTHER_LOGPROBS: ColumnLength
COLUMN_LENGTH_ENTROPIES: ColumnLength
COLUMN_LENGTH_GIVEN_TOKENS: ColumnLength
COLUMN_LENGTH_GIVEN_LOGPROBS: ColumnLength
COLUMN_LENGTH_MASKED_TOKENS: ColumnLength
COLUMN_LENGTH_MASK_TOKENS: ColumnLength
TOKEN_RULE_UNSPECIFIED: TokenRule
TOKEN_RULE_NONE: TokenRule
TOKEN_RULE_ANY: TokenRule
TOKEN_RULE_SOME: TokenRule
BOUNDS_FIELD_NUMBER: _ClassVar[int]
bounds: _descriptor.FieldDescriptor
MESSAGE_BOUNDS_FIELD_NUMBER: _ClassVar[int]
message_bounds: _descriptor.FieldDescriptor
STATUS_RULE_FIELD_NUMBER: _ClassVar[int]
status_rule: _descriptor.FieldDescriptor

class FieldBounds(_message.Message):
    __slots__ = ("min", "max", "default_max", "max_items", "default_max_items", "max_bytes", "min_bytes", "length", "finite", "unique", "named", "required", "least")
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_MAX_FIELD_NUMBER: _ClassVar[int]
    MAX_ITEMS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_MAX_ITEMS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    MIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    FINITE_FIELD_NUMBER: _ClassVar[int]
    UNIQUE_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    min: int
    max: int
    default_max: int
    max_items: int
    default_max_items: int
    max_bytes: int
    min_bytes: int
    length: ColumnLength
    finite: bool
    unique: bool
    named: bool
    required: bool
    least: int
    def __init__(self, min: _Optional[int] = ..., max: _Optional[int] = ..., default_max: _Optional[int] = ..., max_items: _Optional[int] = ..., default_max_items: _Optional[int] = ..., max_bytes: _Optional[int] = ..., min_bytes: _Optional[int] = ..., length: _Optional[_Union[ColumnLength, str]] = ..., finite: bool = ..., unique: bool = ..., named: bool = ..., required: bool = ..., least: _Optional[int] = ...) -> None: ...

class MessageBounds(_message.Message):
    __slots__ = ("max_bytes", "default_max_bytes")
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_bytes: int
    default_max_bytes: int
    def __init__(self, max_bytes: _Optional[int] = ..., default_max_bytes: _Optional[int] = ...) -> None: ...

class StatusRule(_message.Message):
    __slots__ = ("tokens", "proposals")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    tokens: TokenRule
    proposals: bool
    def __init__(self, tokens: _Optional[_Union[TokenRule, str]] = ..., proposals: bool = ...) -> None: ...
