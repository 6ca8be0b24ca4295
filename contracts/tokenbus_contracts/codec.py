"""Encodes and decodes batches, and checks them in both directions."""

from tokenbus_contracts import native, wire
from tokenbus_contracts.batch import LogprobBatch
from tokenbus_contracts.columns import MessageColumns
from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.limits import Limits
from tokenbus_contracts.schema import check_implementation
from tokenbus_contracts.validate import check_batch, check_header

_DEFAULT = Limits.default()


def encode(batch: LogprobBatch, limits: Limits = _DEFAULT) -> bytes:
    """Return the batch as one protobuf message, or raise the ContractError of the first rule that it breaks.

    Args:
        batch: the batch.
        limits: its limits; default: a deployment's defaults.

    Raises:
        ContractError: the batch breaks a rule; it says which field, the limit and the value.

    Example:
        batch = tokenbus.testing.batch([tokenbus.testing.RowShape(request_id=7, tokens=3, top_k=2)])
        assert tokenbus.decode(tokenbus.encode(batch)) == batch
    """
    if not isinstance(batch, LogprobBatch):
        raise ContractError("batch", "a LogprobBatch", type(batch).__name__, rule=Rule.TYPE)
    check_header(batch.header)  # protobuf would convert values of other types
    data = wire.write(batch, limits)
    if not native.accepts(data, limits):
        # Check the written bytes: the engine may have reused its arrays in the meantime.
        written = wire.read(data)
        check_batch(batch if written is None else written, limits)
        if written is None:
            raise ContractError("batch", "arrays that stay as they are", "ones that changed", rule=Rule.TYPE)
    return data


def decode(data: bytes | bytearray | memoryview, limits: Limits = _DEFAULT) -> LogprobBatch:
    """Return the batch in a valid message, or raise a ContractError.

    It reads any protobuf encoding of a valid batch. The batch's columns are views of `data` if it is bytes, and of a
    copy otherwise.

    Args:
        data: the message.
        limits: its limits; default: a deployment's defaults. The size is checked before anything is parsed.

    Raises:
        ContractError: the message breaks a rule; it says which field, the limit and the value.

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
    """Return the batch in a message without checking it, for tools that inspect refused messages."""
    return _read(_within(data, limits))


def _read(data: bytes) -> LogprobBatch:
    return wire.read(data) or wire.read_any(data)


def _within(data: bytes | bytearray | memoryview, limits: Limits) -> bytes:
    """Return the message as immutable bytes, once its size is checked."""
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
