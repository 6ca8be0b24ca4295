"""The encodings of a batch.

In the plain encoding, each column is packed and contiguous, so that a reader needs no copy. Batches are written in the
plain encoding, with the same bytes that the generated classes write. A plain message may have its fields in any order.
The generated classes read all other encodings.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from tokenbus_contracts import native
from tokenbus_contracts.batch import LogprobBatch
from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.generated.logprob_batch_pb2 import LogprobBatch as BatchMessage
from tokenbus_contracts.header import BatchHeader, from_message, to_wire
from tokenbus_contracts.layout import Index
from tokenbus_contracts.limits import Limits
from tokenbus_contracts.malformed import explain
from tokenbus_contracts.native import RequestColumns, Share
from tokenbus_contracts.schema import (
    BASE_COLUMNS,
    COLUMNS,
    EXTRA_COLUMNS,
    HEADER_KEY,
    NO_COLUMNS,
    ONE_BYTE_VARINT_END,
    Column,
)
from tokenbus_contracts.validate.rows import unnamed

# These tables store column properties for speed, because the loops below run for every message.
_KEYS, _EXTRA_KEYS = ([column.key for column in each] for each in (BASE_COLUMNS, EXTRA_COLUMNS))
_VALUES, _EXTRA_VALUES = (attrgetter(*(column.name for column in each)) for each in (BASE_COLUMNS, EXTRA_COLUMNS))
_TO_READ = {column.key: (column.name, column.dtype, column.item_bytes, column.max_wire_items) for column in COLUMNS}
_MAX_ITEMS = {column.name: column.max_items for column in COLUMNS}
_PREFIXES_KEPT = 4096
_SHIFTS = range(7, 28, 7)
"""The bit shifts of a varint's second to fourth byte. Parsers disagree about varints of more than four bytes."""
_SMALL_BYTES = 4096
"""The size in bytes below which a copy is cheaper than a buffer."""


def write(batch: LogprobBatch, limits: Limits) -> bytes:
    """Return the encoded batch without validation. A batch above the size limit raises a ContractError."""
    header = to_wire(batch.header)
    pieces: list[Any] = [prefix_of(HEADER_KEY, len(header)), header]
    size, most = len(pieces[0]) + len(header), limits.max_message_bytes
    message = batch._message  # noqa: SLF001 - the columns of a message are encoded already
    if message is not None:
        pieces.append(fields := message.fields())
        size += len(fields)
    columns: Iterable[tuple[int, Any]] = zip(_KEYS, _VALUES(batch), strict=True) if message is None else ()
    if message is None and batch.has_extras:
        columns = chain(columns, zip(_EXTRA_KEYS, _EXTRA_VALUES(batch), strict=True))
    for key, values in columns:
        length = values.nbytes
        if length:
            prefix = prefix_of(key, length)
            size += len(prefix) + length
            # If the message is too large, the loop only adds up the size, which the error states.
            if size <= most:
                as_it_lies = length >= _SMALL_BYTES and values.flags.c_contiguous
                pieces += (prefix, values if as_it_lies else values.tobytes())
    if size > most:
        raise ContractError("message", most, size, rule=Rule.BYTES)
    return b"".join(pieces)


def deal(  # noqa: PLR0913, PLR0917 - the arguments of the compiled function
    batch: LogprobBatch, header: BatchHeader, slots: Index, requests: RequestColumns, stream: int, least: int
) -> tuple[Index, list[Share]] | None:
    """Distribute a batch's rows among the consumers of their requests. `slots` has the index of each row's request.

    Returns the indexes of the rows, ordered by consumer and then by batch index, and a Share for each consumer. The
    Share of a consumer whose number is below `least` has no message. The messages are not validated. Returns None if
    the batch is not a received message, or if a row is not the next row of its request.
    """
    message = batch._message  # noqa: SLF001 - the columns of a message are encoded already
    if message is None:
        return None
    head = to_wire(header)
    head = prefix_of(HEADER_KEY, len(head)) + head
    return native.deal(message.data, message.places, slots, requests, stream, least, head)


def read(data: bytes) -> LogprobBatch | None:
    """Decode a batch from a plain message without validation, or return None if the message has another encoding.

    The length of a column is compared with its bound before the column is read.
    """
    header = None
    columns = NO_COLUMNS.copy()
    at, end = 0, len(data)
    try:
        while at < end:
            start = at
            key = data[at]
            at += 1
            if key >= ONE_BYTE_VARINT_END:
                key, at = _varint(data, at - 1)
            length, at = _varint(data, at)
            behind = at + length
            if behind > end or not length:
                return None
            if key == HEADER_KEY:
                if header is not None:
                    return None
                # Parse the header as the only field of a batch.
                # The parser then allows the same depth of nested messages as in a whole batch.
                header = from_message(BatchMessage.FromString(data[start:behind]).header)
            else:
                name, dtype, item_bytes, max_wire_items = _TO_READ[key]
                items = length // item_bytes
                if items > max_wire_items:
                    raise ContractError(name, _MAX_ITEMS[name], items, rule=Rule.ITEMS)
                if (name in columns and columns[name].size) or items * item_bytes != length:
                    return None
                if item_bytes == 1 and not data[at:behind].isascii():
                    return None
                columns[name] = np.frombuffer(data, dtype, items, at)
            at = behind
    except (IndexError, KeyError, DecodeError):
        return None
    return None if header is None else LogprobBatch.of_views(header, columns)


def read_any(data: bytes) -> LogprobBatch:
    """Decode a batch from any encoding of a message, and check only the ranges of the columns' types.

    The caller must check the message's size first, because the parser's memory grows with the size.
    """
    try:
        message = BatchMessage.FromString(data)
    except DecodeError:
        raise explain(data) from None
    if not message.HasField("header"):
        raise ContractError("header", "a header", "none", rule=Rule.REQUIRED)
    columns = {
        column.name: _column(column, values)
        for column in COLUMNS
        if (values := getattr(message, column.name)) or column in BASE_COLUMNS
    }
    return LogprobBatch.of_views(from_message(message.header), columns)


def _column(column: Column, values: Any) -> npt.NDArray[Any]:  # noqa: ANN401 - protobuf has no type for these lists
    count = len(values)
    if count > column.max_items:
        raise ContractError(column.name, column.max_items, count, rule=Rule.ITEMS)
    if column.item_bytes > 1:
        return np.fromiter(values, column.dtype, count)
    wide = np.fromiter(values, np.int64, count)
    if count and (wide.max() >= ONE_BYTE_VARINT_END or wide.min() < 0):
        element = int(((wide >= ONE_BYTE_VARINT_END) | (wide < 0)).argmax())
        if column.named:
            raise unnamed(column, element, int(wide[element]))
        raise ContractError(f"{column.name}[{element}]", column.max, int(wide[element]), rule=Rule.MAX)
    return wide.astype(column.dtype)


@lru_cache(_PREFIXES_KEPT)
def prefix_of(key: int, length: int) -> bytes:
    """Return the start of a field: the key and the length as varints."""
    return varint(key) + varint(length)


def varint(value: int) -> bytes:
    digits = bytearray()
    while value >= ONE_BYTE_VARINT_END:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the varint at an offset and the offset after it, or raise IndexError for an invalid varint."""
    value = data[at]
    if value < ONE_BYTE_VARINT_END:
        return value, at + 1
    value &= 0x7F
    for shift in _SHIFTS:
        at += 1
        digit = data[at]
        value |= (digit & 0x7F) << shift
        if digit < ONE_BYTE_VARINT_END:
            return value, at + 1
    raise IndexError(at)
