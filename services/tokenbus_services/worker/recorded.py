"""What a replay has to know of a recorded item, and how an item becomes another worker's."""

from collections.abc import Iterable
from typing import NamedTuple

from tokenbus_contracts import ContractError, Limits, LogprobBatch, decode, encode
from tokenbus_contracts.codec import parse
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.request_pb2 import RequestEvent
from tokenbus_contracts.generated.stream_pb2 import PayloadKind
from tokenbus_services.delivery.step import LEAVES
from tokenbus_services.recording import Entry, RecordingError

_LIMITS = Limits.schema()


class Contents(NamedTuple):
    """When an item was produced, and which requests are in it."""

    produced_at_ns: int
    """Zero: not known."""
    present: Iterable[int]
    ended: Iterable[int]


_NOTHING = Contents(0, (), ())


def contents_of(entry: Entry) -> Contents:
    """Return what is in an entry; of a gap, and of a payload that cannot be read, nothing is known."""
    if entry.frame.WhichOneof("body") == "gap":
        return _NOTHING._replace(ended=entry.frame.gap.request_keys)
    try:
        match entry.frame.item.payload_kind:
            case PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH:
                return _contents_of_batch(parse(entry.payload, _LIMITS))
            case PayloadKind.PAYLOAD_KIND_REQUEST_EVENT:
                return _contents_of_event(read_frame(RequestEvent, entry.payload))
    except ContractError:
        pass  # the processor says what is wrong with it, as it did when it was published
    return _NOTHING


def renamed(entry: Entry, worker_id: str, epoch: int) -> bytes:
    """Return an item's payload as another worker would have published it; one that cannot be is a RecordingError."""
    try:
        match entry.frame.item.payload_kind:
            case PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH:
                batch = decode(entry.payload, _LIMITS)
                header = batch.header._replace(worker_id=worker_id, epoch=epoch)
                return encode(LogprobBatch.of_views(header, batch.columns), _LIMITS)
            case PayloadKind.PAYLOAD_KIND_REQUEST_EVENT:
                event = read_frame(RequestEvent, entry.payload)
                if event.WhichOneof("event") == "admitted":
                    event.admitted.worker_id, event.admitted.epoch = worker_id, epoch
                return write_frame(event)
    except ContractError as error:
        raise RecordingError(entry.offset, f"item {entry.frame.item.sequence}: {error}") from None
    return entry.payload


def _contents_of_batch(batch: LogprobBatch) -> Contents:
    if not batch.has_consistent_lengths():
        return _NOTHING
    keys = batch.request_keys
    return Contents(batch.header.produced_at_ns, keys.tolist(), keys[LEAVES[batch.statuses]].tolist())


def _contents_of_event(event: RequestEvent) -> Contents:
    match event.WhichOneof("event"):
        case "admitted":
            return _NOTHING._replace(present=[event.admitted.request_key])
        case "error":
            return _NOTHING._replace(ended=[event.error.request_key])
    return _NOTHING
