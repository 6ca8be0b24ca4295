"""What all rows of a batch have in common, as a plain tuple with names."""

from operator import index
from typing import Any, NamedTuple

from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.generated.enums import BatchKind, SpeculativeMethod, StepPhase, ValueKind
from tokenbus_contracts.generated.logprob_batch_pb2 import BatchHeader as HeaderMessage
from tokenbus_contracts.schema import MAJOR, MINOR


class BatchHeader(NamedTuple):
    """A batch's header; the fields are the schema's, and logprob_batch.proto says what each means.

    Where a newer minor's value has no name here, as `method` may, the field holds the bare number.

    Example:
        header = tokenbus.BatchHeader("worker-0", epoch=1, sequence=1, step=1, step_rows=2)
        assert header.kind is tokenbus.BatchKind.TARGET
    """

    worker_id: str
    epoch: int
    sequence: int
    step: int
    step_rows: int
    part_index: int = 0
    part_count: int = 1
    selection: bool = False
    kind: BatchKind = BatchKind.TARGET
    phase: StepPhase = StepPhase.DECODE
    method: SpeculativeMethod | int = SpeculativeMethod.NONE
    value_kind: ValueKind = ValueKind.UNSPECIFIED
    tp_rank: int = 0
    dp_rank: int = 0
    vocabulary_size: int = 0
    weight_version: int = 0
    produced_at_ns: int = 0
    draft_follows: bool = False
    schema_major: int = MAJOR
    schema_minor: int = MINOR


def to_wire(header: BatchHeader) -> bytes:
    """Return the header's bytes, or a ContractError for a value that its field cannot hold."""
    try:
        return HeaderMessage(**header._asdict()).SerializeToString(deterministic=True)
    except (TypeError, ValueError):
        raise misfit(header) from None


def from_message(message: HeaderMessage) -> BatchHeader:
    """Return the header that the generated class read."""
    # By position: this is on every message's way, and keywords cost as much again.
    return BatchHeader(
        message.worker_id,
        message.epoch,
        message.sequence,
        message.step,
        message.step_rows,
        message.part_index,
        message.part_count,
        message.selection,
        _KINDS.get(message.kind, message.kind),  # type: ignore[arg-type]
        _PHASES.get(message.phase, message.phase),  # type: ignore[arg-type]
        _METHODS.get(message.method, message.method),
        _VALUE_KINDS.get(message.value_kind, message.value_kind),  # type: ignore[arg-type]
        message.tp_rank,
        message.dp_rank,
        message.vocabulary_size,
        message.weight_version,
        message.produced_at_ns,
        message.draft_follows,
        message.schema_major,
        message.schema_minor,
    )


# A look-up in a dict costs a tenth of calling the enum.
_KINDS = {int(value): value for value in BatchKind}
_PHASES = {int(value): value for value in StepPhase}
_METHODS = {int(value): value for value in SpeculativeMethod}
_VALUE_KINDS = {int(value): value for value in ValueKind}


def misfit(header: BatchHeader) -> ContractError:
    """Return the error for the first value that is not of its field's type."""
    for name, value in header._asdict().items():
        wanted = _TYPES.get(name, "a whole number")
        try:
            fits = _fits(name, value)
        except (TypeError, ValueError):
            fits = False
        if not fits:
            return ContractError(f"header.{name}", wanted, repr(value), rule=Rule.TYPE)
    return ContractError("header", "values that fit their fields", repr(header), rule=Rule.TYPE)


_FLAGS = ("selection", "draft_follows")
_TYPES = {"worker_id": "text that UTF-8 can hold"} | dict.fromkeys(_FLAGS, "True or False")


def _fits(name: str, value: Any) -> bool:  # noqa: ANN401 - anything may have been passed
    if name == "worker_id":
        return isinstance(value, str) and value.encode() is not None
    if name in _FLAGS:
        return isinstance(value, bool)
    return 0 <= index(value) < 1 << 64
