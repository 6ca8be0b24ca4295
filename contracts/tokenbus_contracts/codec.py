"""A batch to bytes and back, checked both ways."""

from tokenbus_contracts import foreign, wire
from tokenbus_contracts.batch import LogprobBatch
from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.limits import Limits
from tokenbus_contracts.validate import check_batch

_DEFAULT = Limits.default()


def encode(batch: LogprobBatch, limits: Limits = _DEFAULT) -> bytes:
    """Return the batch as one protobuf message, or raise the ContractError of the first rule that it breaks."""
    check_batch(batch, limits)
    return wire.write(batch, limits)


def decode(data: bytes | bytearray | memoryview, limits: Limits = _DEFAULT) -> LogprobBatch:
    """Return the batch in a message that keeps the contract, or raise a ContractError.

    Any protobuf encoding of a valid batch is read. The batch's columns are views of `data` if it is bytes,
    and of a copy otherwise.
    """
    batch = parse(data, limits)
    check_batch(batch, limits)
    return batch


def parse(data: bytes | bytearray | memoryview, limits: Limits = _DEFAULT) -> LogprobBatch:
    """Return the batch in a message without checking it: for tools that look into what `decode` refuses."""
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size > limits.max_message_bytes:
        raise ContractError("message", limits.max_message_bytes, size, rule=Rule.BYTES)
    data = bytes(data)
    return wire.read(data) or foreign.read(data)
