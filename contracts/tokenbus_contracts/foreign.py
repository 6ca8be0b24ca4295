"""Any other encoding of a batch: read by the generated classes, so that it means what it means to them."""

from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from tokenbus_contracts.batch import LogprobBatch
from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.generated.logprob_batch_pb2 import LogprobBatch as BatchMessage
from tokenbus_contracts.header import from_message
from tokenbus_contracts.malformed import explain
from tokenbus_contracts.schema import COLUMNS, ONE_BYTE_VARINT_END, Column
from tokenbus_contracts.validate.rows import unnamed


def read(data: bytes) -> LogprobBatch:
    """Return the batch in a message, unchecked but for what its columns' types cannot hold.

    The parser takes at most a small multiple of the message's own size, and that has been checked.
    """
    try:
        message = BatchMessage.FromString(data)
    except DecodeError:
        raise explain(data) from None
    return from_generated(message)


def from_generated(message: BatchMessage) -> LogprobBatch:
    """Return the columns of a message that the generated class holds."""
    if not message.HasField("header"):
        raise ContractError("header", "a header", "none", rule=Rule.REQUIRED)
    columns = {column.name: _column(column, getattr(message, column.name)) for column in COLUMNS}
    return LogprobBatch.of_views(from_message(message.header), columns)


def _column(column: Column, values: Any) -> npt.NDArray[Any]:  # noqa: ANN401 - protobuf has no type for all of them
    count = len(values)
    if count > column.max_items:
        raise ContractError(column.name, column.max_items, count, rule=Rule.ITEMS)
    if not column.is_bytes:
        return np.fromiter(values, column.dtype, count)
    wide = np.fromiter(values, np.int64, count)
    if count and (wide.max() >= ONE_BYTE_VARINT_END or wide.min() < 0):
        element = int(((wide >= ONE_BYTE_VARINT_END) | (wide < 0)).argmax())
        if column.named:
            raise unnamed(column, element, int(wide[element]))
        raise ContractError(f"{column.name}[{element}]", column.max, int(wide[element]), rule=Rule.MAX)
    return wide.astype(column.dtype)
