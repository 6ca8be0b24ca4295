"""Encodes, decodes and checks batches."""

from tokenbus_contracts import native, wire
from tokenbus_contracts.batch import LogprobBatch
from tokenbus_contracts.columns import MessageColumns
from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.limits import Limits
from tokenbus_contracts.schema import check_implementation
from tokenbus_contracts.validate import check_batch, check_header

_DEFAULT = Limits.default()


def encode(batch: LogprobBatch, limits: Limits = _DEFAULT) -> bytes:
    """Return the batch as one protobuf message, or raise a ContractError.

    Args:
        batch: the batch.
        limits: the limits to check. The default is the default limits of a deployment.

    Raises:
        ContractError: the batch breaks a rule. The error names the first invalid field, its limit and its value.

    Example:
        batch = tokenbus.testing.batch([tokenbus.testing.RowShape(request_id=7, tokens=3, top_k=2)])
        assert tokenbus.decode(tokenbus.encode(batch)) == batch
    """
    if not isinstance(batch, LogprobBatch):
        raise ContractError("batch", "a LogprobBatch", type(batch).__name__, rule=Rule.TYPE)
    check_header(batch.header)  # protobuf would silently convert values of wrong types
    data = wire.write(batch, limits)
    if not native.accepts(data, limits):
        # Check the written bytes, because the engine may have changed the arrays since they were copied.
        written = wire.read(data)
        check_batch(batch if written is None else written, limits)
        if written is None:
            raise ContractError("batch", "arrays that stay as they are", "ones that changed", rule=Rule.TYPE)
    return data


def decode(data: bytes | bytearray | memoryview, limits: Limits = _DEFAULT) -> LogprobBatch:
    """Return the batch in a valid message, or raise a ContractError.

    Any protobuf encoding of a valid batch is accepted. If `data` is bytes, the batch's columns are views of `data`.
    Otherwise, the columns are views of a copy.

    Args:
        data: the message.
        limits: the limits to check. The default is the default limits of a deployment. The size is checked first.

    Raises:
        ContractError: the message breaks a rule. The error names the field, the limit and the value.

    Example:
        try:
            tokenbus.decode(b"no batch")
        except tokenbus.ContractError as error:
            print(error.field, error.limit, error.actual, error.rule)
    """
    data = _within(data, limits)
    if (found := native.read(data, limits)) is not None:
        header, places = found
        return LogprobBatch.of_message(header, MessageColumns(data, places))
    batch = _read(data)
    check_batch(batch, limits)
    return batch


def parse(data: bytes | bytearray | memoryview, limits: Limits = _DEFAULT) -> LogprobBatch:
    """Decode a batch without validation, for tools that inspect refused messages."""
    return _read(_within(data, limits))


def _read(data: bytes) -> LogprobBatch:
    return wire.read(data) or wire.read_any(data)


def _within(data: bytes | bytearray | memoryview, limits: Limits) -> bytes:
    """Check the size of a message, and return the message as immutable bytes."""
    check_implementation()
    if type(data) is bytes:
        size = len(data)
    else:
        try:
            size = memoryview(data).nbytes
        except (TypeError, ValueError):
            raise ContractError("message", "bytes", type(data).__name__, rule=Rule.TYPE) from None
    if size > limits.max_message_bytes:
        raise ContractError("message", limits.max_message_bytes, size, rule=Rule.BYTES)
    return bytes(data)
