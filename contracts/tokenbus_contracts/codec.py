"""A batch to bytes and back, checked both ways."""

from tokenbus_contracts import foreign, native, wire
from tokenbus_contracts.batch import LogprobBatch
from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.limits import Limits
from tokenbus_contracts.validate import check_batch
from tokenbus_contracts.validate.header import check_header

_DEFAULT = Limits.default()


def encode(batch: LogprobBatch, limits: Limits = _DEFAULT) -> bytes:
    """Return the batch as one protobuf message, or raise the ContractError of the first rule that it breaks."""
    if not isinstance(batch, LogprobBatch):
        raise ContractError("batch", "a LogprobBatch", type(batch).__name__, rule=Rule.TYPE)
    check_header(batch.header)  # before protobuf turns values of other types into its own
    data = wire.write(batch, limits)
    if not native.accepts(data, limits):
        # What was written is what counts: an engine may have used its arrays again in the meantime.
        written = wire.read(data)
        check_batch(batch if written is None else written, limits)
        if written is None:
            raise ContractError("batch", "arrays that stay as they are", "ones that changed", rule=Rule.TYPE)
    return data


def decode(data: bytes | bytearray | memoryview, limits: Limits = _DEFAULT) -> LogprobBatch:
    """Return the batch in a message that keeps the contract, or raise a ContractError.

    Any protobuf encoding of a valid batch is read. The batch's columns are views of `data` if it is bytes,
    and of a copy otherwise.
    """
    data = _within(data, limits)
    batch = native.read(data, limits)
    if batch is None:
        batch = _read(data)
        check_batch(batch, limits)
    return batch


def parse(data: bytes | bytearray | memoryview, limits: Limits = _DEFAULT) -> LogprobBatch:
    """Return the batch in a message without checking it: for tools that look into what `decode` refuses."""
    return _read(_within(data, limits))


def _read(data: bytes) -> LogprobBatch:
    return wire.read(data) or foreign.read(data)


def _within(data: bytes | bytearray | memoryview, limits: Limits) -> bytes:
    """Return the message as bytes that cannot change; its size is looked at before anything else."""
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
