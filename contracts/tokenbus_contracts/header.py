"""BatchHeader: the properties that all rows of a batch share."""

from collections.abc import Sequence
from operator import attrgetter, index, itemgetter
from typing import Any, NamedTuple

from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.generated.enums import BatchKind, SpeculativeMethod, StepPhase, ValueKind
from tokenbus_contracts.generated.logprob_batch_pb2 import BatchHeader as HeaderMessage
from tokenbus_contracts.schema import HEADER, MAJOR, MINOR


class BatchHeader(NamedTuple):
    """A batch's header, whose fields logprob_batch.proto documents.

    An enum field such as `method` is a plain number if only a newer minor version has a name for the value.

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
    """Return the encoded header. A ContractError names a value that does not fit its field."""
    fields: dict[str, Any] = dict(zip(_FIELDS, header, strict=True))
    try:
        return HeaderMessage(**fields).SerializeToString(deterministic=True)
    except (TypeError, ValueError):
        raise misfit(header) from None


def from_message(message: HeaderMessage) -> BatchHeader:
    return _named([*_ATTRIBUTES(message)])


def from_values(values: Sequence[int], worker_id: str) -> BatchHeader:
    """Return a header with this worker id. `values` has each other value at the index of its field number."""
    return _named([worker_id, *_NUMBERED(values)])


def _named(values: list[Any]) -> BatchHeader:
    for place in _FLAG_PLACES:
        values[place] = values[place] != 0
    for place, names in _NAMES:
        values[place] = names.get(values[place], values[place])
    return tuple.__new__(BatchHeader, values)


_FIELDS = BatchHeader._fields
_ATTRIBUTES = attrgetter(*_FIELDS)
_NUMBERED = itemgetter(*(HEADER.fields_by_name[name].number for name in _FIELDS[1:]))
_FLAGS = ("selection", "draft_follows")
_FLAG_PLACES = [_FIELDS.index(name) for name in _FLAGS]
_ENUMS = {"kind": BatchKind, "phase": StepPhase, "method": SpeculativeMethod, "value_kind": ValueKind}
# Looking up a value in a dict takes a tenth of the time of calling the enum.
_NAMES = [(_FIELDS.index(name), {int(value): value for value in enum}) for name, enum in _ENUMS.items()]


def misfit(header: BatchHeader) -> ContractError:
    """Return the error for the first value that does not fit its field's type."""
    for name, value in header._asdict().items():
        wanted = _TYPES.get(name, "a whole number")
        try:
            fits = _fits(name, value)
        except (TypeError, ValueError):
            fits = False
        if not fits:
            return ContractError(f"header.{name}", wanted, repr(value), rule=Rule.TYPE)
    return ContractError("header", "values that fit their fields", repr(header), rule=Rule.TYPE)


_TYPES = {"worker_id": "text that UTF-8 can hold"} | dict.fromkeys(_FLAGS, "True or False")


def _fits(name: str, value: Any) -> bool:  # noqa: ANN401 - anything may have been passed
    if name == "worker_id":
        return isinstance(value, str) and value.encode() is not None
    if name in _FLAGS:
        return isinstance(value, bool)
    return 0 <= index(value) < 1 << 64
